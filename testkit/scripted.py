"""
Scripted decoding: the real server, pipeline and model, with the tokens decided here.

A logits processor forces one token a step, so an answer goes through everything that
a real model's answer goes through. The seam is the `extra_processors` argument of
`sidecar.app.build`; no setting and no production code reaches it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from tokenizers import Tokenizer

from sidecar.engine.job import Job
from sidecar.engine.sampling import LogitsProcessor
from sidecar.engine.scheduler import ExtraProcessors
from testkit.tiny_models import BUILTIN

Json = Mapping[str, Any]

_END = "<|im_end|>"
_TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>", re.S)
_TOOLS = re.compile(r"You may call these functions:\n<tools>\n(.*?)\n</tools>", re.S)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.S)
_THINK = re.compile(r"<think>(.*?)</think>", re.S)
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the model writes it."""

    name: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model shall say."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the prompt; each tool result is a turn of its own."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """
    What the model reads, taken apart.

    Args:
        tools: the offered functions (`name`, `description`, `parameters`).
        thinking: whether the model may open a think block.
    """

    text: str
    turns: tuple[Turn, ...]
    tools: tuple[Json, ...]
    thinking: bool

    @property
    def num_answers(self) -> int:
        """Turns the assistant has had."""
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def tail(self) -> str:
        """All that was said since the assistant's last turn."""
        texts: list[str] = []
        for turn in self.turns:
            texts = [] if turn.role == "assistant" else [*texts, turn.text]
        return "\n".join(texts)


# Decides the raw text of an answer, without the end-of-turn token.
Script = Callable[[Prompt], str]


def scripted(script: Script) -> ExtraProcessors:
    """Make the server say what `script` decides; for models with our tokenizer."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    end_id = tokenizer.token_to_id(_END)

    def processors(job: Job, _choice: int) -> list[LogitsProcessor]:
        raw = script(parse_prompt(_read(job, tokenizer)))
        ids = tokenizer.encode(raw, add_special_tokens=False).ids
        return [Forced([*ids, end_id])]

    return processors


def _read(job: Job, tokenizer: Tokenizer) -> str:
    """The prompt as text, each image as what people are told of it."""
    prompt, text, at = job.spec.prompt, "", 0
    for placed in prompt.images:
        before = list(prompt.ids[at : placed.start])
        text += tokenizer.decode(before, skip_special_tokens=False) + placed.image.label
        at = placed.end
    return text + tokenizer.decode(list(prompt.ids[at:]), skip_special_tokens=False)


class Forced:
    """Lets one token through at each place of an answer."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._before: int | None = None  # tokens that are known at its first place
        self.num_steps = len(ids)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._before is None:
            self._before = len(tokens)
        # The engine computes one step ahead, so there is one call after the end.
        wanted = self._ids[min(len(tokens) - self._before, len(self._ids) - 1)]
        chosen = mx.arange(logits.shape[-1]) == wanted
        # The token must need the logits: MLX computes nothing that no result needs,
        # and would leave all steps of an answer to whoever asks for its KV.
        return mx.where(chosen, logits, -mx.inf)


def parse_prompt(text: str) -> Prompt:
    """Take a prompt of the built-in template apart."""
    turns: list[Turn] = []
    for match in _TURN.finditer(text):
        turns += _turns(match[1], match[2])
    offered = _TOOLS.search(turns[0].text) if turns else None
    lines = offered[1].splitlines() if offered else []
    return Prompt(
        text,
        tuple(turns),
        tuple(json.loads(line)["function"] for line in lines),
        thinking=not text.endswith("</think>\n\n"),
    )


def _turns(role: Any, text: str) -> list[Turn]:
    if role == "user" and text.startswith("<tool_response>"):
        return [Turn("tool", result) for result in _RESULT.findall(text)]
    if role == "assistant":
        said = _CALL.sub("", _THINK.sub("", text, count=1)).strip()
        return [Turn("assistant", said, tuple(map(_read_call, _CALL.findall(text))))]
    return [Turn(role, text)]


def _read_call(text: str) -> Call:
    value = json.loads(text, strict=False)
    return Call(value["name"], value["arguments"])


def render(answer: Answer, prompt: Prompt) -> str:
    """The answer as the built-in model would write it after this prompt."""
    parts = []
    if answer.reasoning.strip() and prompt.thinking:
        parts.append(f"<think>\n{answer.reasoning.strip()}\n</think>\n")
    if answer.text.strip():
        parts.append(answer.text.strip())
    parts += [f"<tool_call>\n{_call_json(call)}\n</tool_call>" for call in answer.calls]
    return "\n".join(parts)


def _call_json(call: Call) -> str:
    value = {"name": call.name, "arguments": call.arguments}
    return json.dumps(value, ensure_ascii=False)


class Switch:
    """A script that a test can change while the server runs."""

    def __init__(self) -> None:
        self.script: Script = lambda _prompt: "Nothing was scripted."
        self.prompts: list[Prompt] = []

    def __call__(self, prompt: Prompt) -> str:
        """Note the prompt and ask the script in force."""
        self.prompts.append(prompt)
        return self.script(prompt)
