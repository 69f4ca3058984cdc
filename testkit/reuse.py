"""
How much of each recorded request a server must prefill, and how little it could.

The server is real and says what was recorded. Beside what it reports, the most that
any exact reuse could give is worked out from nothing but ids: what the model read,
and what it said.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from sidecar.app import App
from sidecar.core.errors import SidecarError
from sidecar.core.requests import Message
from sidecar.dialects.anthropic_messages.request import parse_messages
from sidecar.dialects.openai_chat.tools import call_dict
from sidecar.engine.job import Job
from sidecar.engine.sampling import LogitsProcessor
from sidecar.engine.scheduler import ExtraProcessors
from sidecar.server.http_messages import Endpoint, EventStream, Request, Response
from sidecar.server.router import Routes
from testkit.replay import Replayer, Reply
from testkit.scripted import Json, Prompt, Script, scripted
from testkit.servers import running_sidecar
from testkit.tiny_models import BUILTIN
from testkit.traces import Exchange, ReplayScript

_CALL = re.compile(r"<tool_call>\n(\{.*\})\n</tool_call>")


@dataclass(frozen=True, slots=True)
class Served:
    """
    One request and what became of it.

    Args:
        body: as the sidecar got it, always Chat.
        cached_len: prompt tokens not prefilled, as the client was told.
        oracle_len: prompt tokens that exact reuse could have saved: the longest
            beginning of this prompt that an earlier request had in its KV.
        thinking: whether the prompt let the model think.
        said: the answer as the model wrote it.
    """

    seq: int
    body: Json
    prompt_len: int
    cached_len: int
    oracle_len: int
    thinking: bool
    said: str

    @property
    def prefilled_len(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_len - self.cached_len


# A change to the raw text of an answer that no client can see.
Hand = Callable[[str], str]


def as_rendered(raw: str) -> str:
    """The hand of a model that writes as its template renders: kindest to a cache."""
    return raw


def compact(raw: str) -> str:
    """The hand of a model that writes calls without spaces, as no template does."""
    return _CALL.sub(
        lambda call: f"<tool_call>{_without_spaces(call[1])}</tool_call>", raw
    )


class Recorder:
    """
    Plays recorded answers in a sidecar and notes what goes in and out.

    Args:
        exchanges: the conversation whose answers it gives.
        hand: how the model writes them.
    """

    def __init__(self, exchanges: Sequence[Exchange], hand: Hand) -> None:
        self.url = ""
        self.bodies: list[Json] = []
        self.jobs: list[Job] = []
        self.prompts: list[Prompt] = []
        self.said: list[str] = []
        self.num_held = 0  # answers that were to be held to a form
        self._script: Script = ReplayScript(exchanges)
        self._hand = hand
        self._forced = scripted(self._answer)

    def processors(self, job: Job, choice: int) -> list[LogitsProcessor]:
        """The seam in the engine: note the job and force its answer."""
        self.jobs.append(job)
        if job.spec.constraint is not None:  # which a recorded answer need not keep to
            self.num_held += 1
            job.spec = replace(job.spec, constraint=None)
        return self._forced(job, choice)

    def listen(self, app: App) -> None:
        """Note the bodies of the chat requests a sidecar gets from now on."""
        self.url = app.url
        app.listener.routes = _Tap(app.listener.routes, self.bodies)  # type: ignore[assignment]

    def _answer(self, prompt: Prompt) -> str:
        self.prompts.append(prompt)
        self.said.append(self._hand(self._script(prompt)))
        return self.said[-1]


def _without_spaces(text: str) -> str:
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


class _Tap:
    """Routes that keep a copy of what is posted."""

    def __init__(self, routes: Routes, bodies: list[Json]) -> None:
        self._routes = routes
        self._bodies = bodies

    def find(self, method: str, path: str) -> tuple[Endpoint, str]:
        endpoint, tail = self._routes.find(method, path)

        def noting(request: Request) -> Response | EventStream:
            if path.endswith("/chat/completions"):
                self._bodies.append(request.json())
            elif path == "/v1/messages":
                self._bodies.append(_as_chat(request))
            return endpoint(request)

        return noting, tail

    def name(self, path: str) -> str:
        return self._routes.name(path)

    def is_urgent(self, path: str) -> bool:
        return self._routes.is_urgent(path)

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        return self._routes.problem(error, request_id, path)


@contextlib.contextmanager
def recording_sidecar(
    model: Path, exchanges: Sequence[Exchange], hand: Hand
) -> Iterator[Recorder]:
    """A sidecar with default settings, an empty store and the recorded answers."""
    recorder = Recorder(exchanges, hand)
    seam: ExtraProcessors = recorder.processors
    with running_sidecar({"MODEL_PATH": str(model)}, seam) as app:
        recorder.listen(app)
        yield recorder


def with_required_calls(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """The same, in which each third request says that its answer must be a call."""
    return [
        _must_call(exchange) if number % 3 == 2 and exchange.call_ids else exchange
        for number, exchange in enumerate(exchanges)
    ]


# How both formats say that an answer must be a call.
_MUST_CALL = ("required", {"type": "any"})


def _asks_for_form(body: Json) -> bool:
    is_of_form = "format" in (body.get("output_config") or {})
    return is_of_form or body.get("tool_choice") in _MUST_CALL


def _must_call(exchange: Exchange) -> Exchange:
    choice = _MUST_CALL[exchange.is_anthropic]
    return replace(exchange, body={**exchange.body, "tool_choice": choice})


def serve_trace(
    exchanges: Sequence[Exchange], recorder: Recorder, http: httpx.Client, model: str
) -> list[Served]:
    """
    Send the requests one after the other and count.

    Args:
        http: to the recorder's sidecar, or to a proxy that calls it `model`.
    Raises:
        AssertionError: a request was answered otherwise than recorded.
    """
    replayer = Replayer(http, model)
    kv = _KV(recorder)
    served = []
    for number, exchange in enumerate(exchanges):
        reply = replayer.send(exchange)
        assert len(recorder.jobs) == len(recorder.bodies) == number + 1
        prompt_len, cached_len = _prompt_usage(reply)
        served.append(
            Served(
                exchange.seq,
                recorder.bodies[number],
                prompt_len,
                cached_len,
                kv.oracle_len(number),
                recorder.prompts[number].thinking,
                recorder.said[number],
            )
        )
        assert prompt_len == len(recorder.jobs[number].spec.model_ids)
        assert kv.num_said(number) == _num_generated(reply)
    assert recorder.num_held == sum(_asks_for_form(e.body) for e in exchanges)
    return served


def _as_chat(request: Request) -> Json:
    """A Messages request as the Chat request that says the same, for other servers."""
    asked = parse_messages(request.json(), request.request_id, request.headers)
    return {
        "model": asked.model,
        "messages": [_chat_message(message) for message in asked.messages],
        "tools": [dict(tool.raw) for tool in asked.tools],
        "max_tokens": asked.options.max_tokens,
        "chat_template_kwargs": {
            "enable_thinking": asked.thinking.enabled is not False
        },
    }


def _chat_message(message: Message) -> Json:
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [call_dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def common_len(one: Any, other: Any) -> int:
    """Length of the common beginning of two arrays of ids."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(np.argmax(differs)) if differs.any() else length


class _KV:
    """The sequences whose KV the server has had, as ids."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._held: list[Any] = []

    def oracle_len(self, number: int) -> int:
        """The most of prompt `number` that an earlier sequence begins with."""
        prompt = self._prompt(number)
        while len(self._held) < number:
            self._held.append(self._sequence(len(self._held)))
        longest = max((common_len(prompt, ids) for ids in self._held), default=0)
        return min(longest, len(prompt) - 1)  # the last token's logits are needed

    def num_said(self, number: int) -> int:
        """Tokens of an answer, without the end of turn."""
        return len(self._sequence(number)) - len(self._prompt(number)) - 1

    def _prompt(self, number: int) -> Any:
        return np.array(self._recorder.jobs[number].spec.model_ids, np.int32)

    def _sequence(self, number: int) -> Any:
        said = self._recorder.said[number]
        ids = self._tokenizer.encode(said, add_special_tokens=False).ids
        return np.append(self._prompt(number), [*ids, self._end])


def _prompt_usage(reply: Reply) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached; of either dialect."""
    usage = reply.usage
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    cached_len = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached_len, cached_len


def _num_generated(reply: Reply) -> int:
    return int(reply.usage.get("completion_tokens") or reply.usage["output_tokens"])
