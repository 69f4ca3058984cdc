"""
A local model as a Python object: the server without its socket.

    from sidecar.library import open_model

    with open_model("mlx-community/Qwen3-0.6B-4bit") as model:
        for piece in model.chat([{"role": "user", "content": "Hello"}]):
            print(piece.text, end="")

What the HTTP routes take in JSON, these methods take as keywords, and check it the same
way. What cannot be done raises a `SidecarError`, whose message says why.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import mlx.core as mx
import mlx.nn as nn

from sidecar.app import Core, build_core
from sidecar.config.settings import SECTIONS, Config, load_config
from sidecar.config.sources import ConfigError, spellings
from sidecar.core.errors import (
    BadRequest,
    GenerationFailed,
    RequestCancelled,
    SidecarError,
    Unavailable,
)
from sidecar.core.events import (
    CallMetrics,
    ChoiceFinished,
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallEnded,
)
from sidecar.core.native import Classified
from sidecar.core.ports import RequestFacts, RunningAnswer
from sidecar.core.requests import ToolCall
from sidecar.dialects.native import (
    batch_list,
    classified_list,
    parse_attention,
    parse_batch,
    parse_classify,
    parse_train,
)
from sidecar.dialects.openai_chat.stream import OpenAIChat
from sidecar.dialects.openai_completions import parse_completion
from sidecar.engine.loading.checkpoint_details import describe
from sidecar.residents.resident import Resident, require_text
from sidecar.server.asgi import AsgiApp
from sidecar.server.router import Routes

# MLX's own, under the names that a user of this library looks for.
vjp, jvp, value_and_grad, losses = mx.vjp, mx.jvp, mx.value_and_grad, nn.losses

T = TypeVar("T")
Kind = Literal["text", "reasoning", "tool_call", "end"]
Json = dict[str, Any]

_ON_ITS_OWN = {  # what a server's user would be asked about
    "ENABLE_REQUEST_LOGGING": "false",
    "MODEL_DIR": "none",
}
_NO_FILE = Path("/nonexistent/.env")
_LOOK_S = 0.2  # how often a training is looked at
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Piece:
    """
    A part of an answer.

    Args:
        kind: `end` comes last, and says why it ended.
        tokens: that were sampled since the piece before, with their log-probabilities.
        call: a call that is complete.
    """

    kind: Kind
    text: str = ""
    tokens: tuple[TokenLogprob, ...] = ()
    call: ToolCall | None = None
    finish_reason: FinishReason | None = None


def open_model(
    path: str | Path | None = None, settings: Mapping[str, str] | None = None
) -> "Model":
    """
    Load a model and wait for it.

    Args:
        path: a folder, or the name of a model of the hub; None: the built-in one.
        settings: by the names of their environment variables; neither the environment
            nor a `.env` is read.
    Raises:
        ConfigError: a setting is wrong. SidecarError: it cannot be loaded.
    """
    core = build_core(settings_of(path, settings))
    model = Model(core)
    try:
        core.pool.start_loading()
        model.info()
    except BaseException:
        model.close()
        raise
    return model


def settings_of(path: str | Path | None, settings: Mapping[str, str] | None) -> Config:
    """
    The configuration of a model that is opened; nothing is loaded.

    Raises:
        ConfigError: a setting is unknown, no text, or out of its range.
    """
    for name, value in (settings or {}).items():
        if name not in _names():
            raise ConfigError(f"{name} is no setting")
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a text, as it would stand in .env")
    named = {"MODEL_PATH": str(path)} if path is not None else {}
    return load_config({**_ON_ITS_OWN, **named, **(settings or {})}, _NO_FILE, {})


@functools.cache
def _names() -> frozenset[str]:
    """All spellings of all settings."""
    items = (item for section in SECTIONS for item in fields(section))
    return frozenset(name for item in items for name in spellings(item))


def asgi(
    path: str | Path | None = None, settings: Mapping[str, str] | None = None
) -> AsgiApp:
    """
    Load a model for a program with a server of its own, to be mounted at `/v1`.

    Args:
        path, settings: as for `open_model`. MLX_API_KEY is asked for if it is set, and
            a name of the host that is no loopback address must be in ALLOWED_HOSTS.
    """
    return open_model(path, settings).asgi()


class Model:
    """A loaded model. Any thread; calls at the same time share its batch."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}  # by the id of the call
        self._metrics: CallMetrics | None = None
        self._error: str | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, prompt: str | Sequence[int], **fields: Any
    ) -> Generator[Piece, None, None]:
        """
        Go on with a text or with token ids; no template.

        Args:
            fields: of `POST /v1/completions`.
        Raises:
            SidecarError: at the first piece: it cannot be done.
        """
        if fields.get("echo"):
            raise BadRequest("echo must be left out: the prompt is known", param="echo")
        body = {"prompt": _one(prompt), **fields, "include_metrics": True}
        body.setdefault("logprobs", 0)

        def start(request_id: str) -> RunningAnswer:
            request, _ = parse_completion(body, request_id, None)
            _refuse(request.ignored)
            timeout_s = self._core.config.server.timeout_completions_s
            return self._core.services.chat.start_completion(request, timeout_s)

        return self._pieces(body, start)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> Generator[Piece, None, None]:
        """
        Answer a conversation.

        Args:
            fields: of `POST /v1/chat/completions`.
        Raises:
            SidecarError: at the first piece: it cannot be done.
        """
        body = {"messages": list(messages), **fields, "include_metrics": True}
        body.setdefault("logprobs", True)

        def start(request_id: str) -> RunningAnswer:
            request = OpenAIChat().parse(body, _facts(request_id)).chat
            _refuse(request.ignored)
            timeout_s = self._core.config.server.timeout_chat_s
            return self._core.services.chat.start_chat(request, timeout_s)

        return self._pieces(body, start)

    def classify(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        labels: Sequence[str] = (),
        **fields: Any,
    ) -> list[Json]:
        """
        The next token of each prompt or conversation (`messages`), and of labels.

        Args:
            fields: of `POST /native/classify`.
        """
        body = {"labels": list(labels), **fields}
        body |= {} if prompts is None else {"prompts": _listed(prompts)}

        def run(request_id: str, is_wanted: Callable[[], bool]) -> Sequence[Classified]:
            request = parse_classify(body, _facts(request_id))
            return self._core.services.native.classify(request, is_wanted)

        results: list[Json] = classified_list("", self._call(run))["results"]
        return results

    def batch_generate(
        self, prompts: Sequence[str | Sequence[int]] | None = None, **fields: Any
    ) -> list[Json]:
        """
        Answer many prompts, or conversations (`messages`), each on its own.

        Args:
            fields: of `POST /native/batch_generate`.
        """
        body = (
            {**fields} if prompts is None else {"prompts": _listed(prompts), **fields}
        )

        def run(request_id: str, is_wanted: Callable[[], bool]) -> list[Json]:
            request = parse_batch(body, _facts(request_id))
            _refuse(request.first.ignored)
            answers = self._core.services.native.batch_generate(request, is_wanted)
            results: list[Json] = batch_list(request, answers)["results"]
            return results

        return self._call(run)

    def inspect_attention(
        self,
        prompt: str | Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Json:
        """
        The keys that each layer keeps of a prompt, or of one conversation.

        Returns:
            What `POST /native/attention` answers; `keys`: by layer, arrays (heads,
            positions, head dim) in float32, None where a layer has none.
        """
        body: Json = {"format": "npz"}
        body |= {} if prompt is None else {"prompt": _one(prompt)}
        body |= {} if messages is None else {"messages": list(messages)}
        if layers is not None:
            body["layers"] = list(layers)

        def run(request_id: str, is_wanted: Callable[[], bool]) -> Json:
            request = parse_attention(body, _facts(request_id))
            facts, keys = self._core.services.native.inspect(request, is_wanted)
            return {**facts, "keys": keys}

        return self._call(run)

    def train_lora(
        self,
        rows: Sequence[Mapping[str, Any]],
        name: str,
        on_step: Callable[[Json], None] | None = None,
        **fields: Any,
    ) -> Json:
        """
        Train an adapter, wait for it: the model was opened with ADAPTER_DIR.

        Args:
            rows: `text`, `prompt` and `completion`, or `messages` each.
            on_step: takes how far it is, now and then; what it raises ends it all.
            fields: of `POST /native/train`.
        Returns:
            How it went: its steps and losses.
        Raises:
            SidecarError: it cannot be begun, or it failed.
        """
        request = parse_train({"name": name, "data": [*map(dict, rows)], **fields})

        def run(_request_id: str, is_wanted: Callable[[], bool]) -> Json:
            service = self._core.services.training
            training = service.begin(request)
            try:
                while not training.ended.wait(_LOOK_S) and is_wanted():
                    if on_step is not None:
                        on_step(training.as_json())
            finally:
                service.cancel(training.id)
                training.ended.wait()
            if training.state == "cancelled":
                raise RequestCancelled("the training was cancelled")
            if training.error is not None:
                raise GenerationFailed(training.error)
            if on_step is not None:
                on_step(training.as_json())
            return training.as_json()

        return self._call(run)

    def info(self) -> Json:
        """What is known of the model."""
        with self._leased() as resident:
            model = resident.engine.model
            return {
                "name": model.name,
                **describe(model),
                "context_length": resident.max_context,
            }

    def metrics(self) -> Json | None:
        """What the last whole answer of `generate` or `chat` took; None: none yet."""
        return None if self._metrics is None else asdict(self._metrics)

    def err(self) -> str | None:
        """Why the last call failed, `cancelled` if it was; None: it did not."""
        return self._error

    def cancel(self) -> None:
        """End what runs now: iterators end, other calls raise RequestCancelled."""
        with self._lock:
            running = dict(self._running)
        for request_id, is_cancelled in running.items():
            is_cancelled.set()
            self._core.services.chat.cancel(request_id, None)

    def asgi(self) -> AsgiApp:
        """This model at `/v1`, for a program with a server of its own."""
        self._require_open()
        server = self._core.config.server
        return AsgiApp(
            Routes(self._core.services, server), server, server.max_connections
        )

    def close(self) -> int:
        """
        Let the weights go.

        Returns:
            The bytes that the memory in use fell by; a second time 0.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return 0
        self.cancel()
        # Who holds an app of this model is told at once that it is gone.
        self._core.pool.drain()
        self._core.shared.admission.drain()
        self._core.services.chat.stop()
        gpu = self._core.shared.gpu
        before = gpu.call(mx.get_active_memory)
        self._core.close()
        return max(0, before - gpu.call(mx.get_active_memory))

    @contextlib.contextmanager
    def _leased(self) -> Generator[Resident, None, None]:
        self._require_open()
        with self._core.pool.lease("") as leased:
            yield require_text(leased)

    def _require_open(self) -> None:
        if self._is_closed:
            raise Unavailable("this model is closed")

    @contextlib.contextmanager
    def _noted(self) -> Generator[tuple[str, threading.Event], None, None]:
        """A call by its id, which `cancel` finds; how it ends is what `err` says."""
        self._require_open()
        request_id, is_cancelled = f"library-{next(_numbers)}", threading.Event()
        with self._lock:
            self._running[request_id] = is_cancelled
        self._error = None
        try:
            yield request_id, is_cancelled
        except RequestCancelled:
            self._error = "cancelled"
            raise
        except SidecarError as error:
            self._error = error.message
            raise
        finally:
            with self._lock:
                self._running.pop(request_id, None)

    def _call(self, run: Callable[[str, Callable[[], bool]], T]) -> T:
        with self._noted() as (request_id, is_cancelled):
            return run(request_id, lambda: not is_cancelled.is_set())

    def _pieces(
        self, body: Json, start: Callable[[str], RunningAnswer]
    ) -> Generator[Piece, None, None]:
        for name, wanted in (("n", 1), ("stream", False), ("model", "")):
            if body.get(name, wanted) != wanted:
                raise BadRequest(f"{name} must be left out here", param=name)
        with contextlib.suppress(RequestCancelled), self._noted() as (request_id, _):
            run = start(request_id)
            try:
                for event in run.events():
                    piece = self._piece(event)
                    if piece is not None:
                        yield piece
            finally:
                run.close()

    def _piece(self, event: Event) -> Piece | None:
        if isinstance(event, TextDelta):
            return Piece("text", event.text, event.logprobs)
        if isinstance(event, ReasoningDelta):
            return Piece("reasoning", event.text, event.logprobs)
        if isinstance(event, ToolCallEnded):
            return Piece("tool_call", call=event.call)
        if isinstance(event, ChoiceFinished):
            return Piece("end", finish_reason=event.reason)
        if isinstance(event, Finished):
            self._metrics = event.metrics
        return None


def _refuse(ignored: Sequence[str]) -> None:
    """Over HTTP these are named in a header; here nobody would see them."""
    for name in ignored:
        raise BadRequest(f"{name} has no effect here", param=name)


def _one(prompt: str | Sequence[int]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not all(type(one) is int for one in prompt):
        raise BadRequest("prompt must be one text or its token ids", param="prompt")
    return list(prompt)


def _listed(prompts: Sequence[str | Sequence[int]]) -> list[Any]:
    return [one if isinstance(one, str) else list(one) for one in prompts]


def _facts(request_id: str) -> RequestFacts:
    return RequestFacts(request_id, "", {})
