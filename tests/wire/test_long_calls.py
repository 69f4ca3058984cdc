"""
A file of 20 kB in one call: its client has each tenth before the next is written.

The model is held at 5 % of the call, at 15 % and so on, until the client has seen what
was written 5 % before: no clock decides whether an answer was held back on its way.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from sidecar.engine.job import Job
from sidecar.engine.sampling import LogitsProcessor
from sidecar.engine.scheduler import ExtraProcessors
from testkit.proxy import Proxy, running_proxy
from testkit.scripted import Forced, Prompt, scripted
from testkit.servers import running_sidecar

NAME = "local"
LINE = 'def part_{}(): return "</tool_call> {{}} \\\\ é"  # a line of the file\n'
TEXT = "".join(LINE.format(n) for n in range(340))
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
}
FUNCTION = {"name": "write", "description": "Write.", "parameters": SCHEMA}
ARGUMENTS = {"path": "a.py", "content": TEXT}
CALLS = {
    "json": json.dumps({"name": "write", "arguments": ARGUMENTS}, ensure_ascii=False),
    "xml": "<function=write>\n<parameter=path>\na.py\n</parameter>\n"
    f"<parameter=content>\n{TEXT}\n</parameter>\n</function>",
    "glm": "write<arg_key>path</arg_key><arg_value>a.py</arg_value>"
    f"<arg_key>content</arg_key><arg_value>{TEXT}</arg_value>",
}
_LEAD = 0.05
_WAIT_S = 30.0
_MAX_TOKENS = 16_000
_NUM_HOLDS = 10


class Seen:
    """
    How many characters of arguments a client has been given.

    Args:
        is_awaited: the model waits for the client; not in an answer in one piece.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_chars = 0
        self.is_awaited = False
        self.late: list[str] = []

    def restart(self, *, is_awaited: bool) -> None:
        """Before a request."""
        with self._changed:
            self._num_chars, self.is_awaited, self.late = 0, is_awaited, []

    def add(self, num_chars: int) -> None:
        """More came."""
        with self._changed:
            self._num_chars += num_chars
            self._changed.notify_all()

    def wait_for(self, part: float) -> None:
        """Hold the model until so much of the text came, or note that it did not."""
        least = max(1, part * len(TEXT))
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_chars >= least, _WAIT_S):
                self.late.append(f"{self._num_chars} of {least:.0f}")


class Held:
    """Forces tokens, and waits for the client at each tenth."""

    def __init__(self, forced: Forced, seen: Seen) -> None:
        self._forced = forced
        self._seen = seen
        parts = [_LEAD + number / _NUM_HOLDS for number in range(_NUM_HOLDS)]
        self._holds = {int(part * forced.num_steps): part - _LEAD for part in parts}
        self._before: int | None = None  # tokens that are known at its first place

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._before is None:
            self._before = len(tokens) - 1
        # A place comes again if it was in a draft that was not said.
        part = self._holds.pop(len(tokens) - self._before, None)
        if part is not None and self._seen.is_awaited:
            self._seen.wait_for(part)
        return self._forced(tokens, logits)


def say(prompt: Prompt) -> str:
    """A call in the format that the prompt's last word names."""
    return f"<tool_call>\n{CALLS[prompt.turns[-1].text.split()[-1]]}\n</tool_call>"


def held(seen: Seen) -> ExtraProcessors:
    """Like `scripted`, but the model waits for its client."""
    forced = scripted(say)

    def processors(job: Job, choice: int) -> list[LogitsProcessor]:
        return [Held(one, seen) for one in forced(job, choice)]

    return processors


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def proxy(
    seen: Seen,
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Callable[[str], Path],
) -> Iterator[Proxy]:
    """With a model that is quick behind thousands of tokens."""
    settings = {"DEFAULT_THINKING": "false", "MODEL_PATH": str(model_folder("dense"))}
    folder = tmp_path_factory.mktemp("proxy")
    with (
        running_sidecar(settings, held(seen)) as app,
        running_proxy(app.url, folder) as running,
    ):
        yield running


@pytest.mark.parametrize(
    "wanted",
    ["json", *(pytest.param(w, marks=pytest.mark.slow) for w in ("xml", "glm"))],
)
def test_chat_with_the_openai_sdk(proxy: Proxy, seen: Seen, wanted: str) -> None:
    asked = {
        "model": NAME,
        "messages": [{"role": "user", "content": f"Do {wanted}"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": _MAX_TOKENS,
    }
    seen.restart(is_awaited=True)
    pieces = []
    for chunk in proxy.openai.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or ():
                pieces.append(part.function.arguments or "")
                seen.add(len(pieces[-1]))
    assert seen.late == []
    seen.restart(is_awaited=False)
    whole = proxy.openai.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert "".join(pieces) == call.function.arguments
    assert json.loads(call.function.arguments) == ARGUMENTS


def test_responses_with_the_openai_sdk(proxy: Proxy, seen: Seen) -> None:
    seen.restart(is_awaited=True)
    pieces, items = [], []
    for event in proxy.openai.responses.create(
        model=NAME,
        input="Do xml",
        tools=[{"type": "function", **FUNCTION}],
        max_output_tokens=_MAX_TOKENS,
        stream=True,
    ):
        if event.type == "response.function_call_arguments.delta":
            pieces.append(event.delta)
            seen.add(len(event.delta))
        if event.type == "response.output_item.done":
            items.append(event.item)
    assert seen.late == []
    assert items[-1].arguments == "".join(pieces)
    assert json.loads("".join(pieces)) == ARGUMENTS


def test_messages_with_the_anthropic_sdk(proxy: Proxy, seen: Seen) -> None:
    """It parses at each delta all that has come so far."""
    seen.restart(is_awaited=True)
    with proxy.anthropic.messages.stream(
        model=NAME,
        messages=[{"role": "user", "content": "Do json"}],
        tools=[{"name": "write", "input_schema": SCHEMA}],
        max_tokens=_MAX_TOKENS,
    ) as stream:
        for event in stream:
            if event.type == "input_json":
                seen.add(len(event.partial_json))
        final = stream.get_final_message()
    assert seen.late == []
    assert final.content[-1].input == ARGUMENTS
