"""What a running generation says, from the service to whoever formats it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

from sidecar.core.requests import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token with its log-probability and the best alternatives."""

    token: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing happened for a moment: a chance to look at the connection."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The model that is to answer is being loaded: a step of it has begun."""

    step: str


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """
    So much of the prompt is computed; it is sent to a client that asks.

    Args:
        done: tokens, those that were cached among them. total: of the prompt.
        seconds: since its prefill began. seconds_left: None: not known yet.
    """

    done: int
    total: int
    cached: int
    seconds: float
    seconds_left: float | None

    def as_json(self) -> dict[str, float | None]:
        """As llama.cpp's server words it, and the seconds left."""
        left = self.seconds_left
        return {
            "total": self.total,
            "cache": self.cached,
            "processed": self.done,
            "time_ms": round(self.seconds * 1000),
            "seconds_left": None if left is None else round(left, 1),
        }


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningEnded:
    """A piece of thinking is complete; `token` names its turn (core/turn_token)."""

    choice: int
    token: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the visible answer; empty text only to carry logprobs."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The arguments of a call begin; `index` counts the calls of its choice from 0."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """
    A piece of the JSON of a call's arguments.

    All pieces so far are the beginning of a JSON text, whatever follows.
    """

    choice: int
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """
    A call is complete, and this is all of it; a call that was cut never ends.

    Args:
        is_broken: the model went on with what is no JSON.
    """

    choice: int
    index: int
    call: ToolCall
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """
    A choice ended.

    Args:
        stop_string: the request's stop text that ended it.
        token_ids: all that were sampled, without the end-of-turn token.
    """

    choice: int
    reason: FinishReason
    stop_string: str | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """
    Token counts of a whole response.

    Args:
        cached_tokens: of the prompt, which were not prefilled.
        accepted_tokens, rejected_tokens: of what was drafted.
        num_rotated: answers whose context has forgotten its middle.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    num_rotated: int = 0

    @property
    def rotated_field(self) -> dict[str, bool]:
        """What is said of that beside the counts, in all formats."""
        return {"x_context_rotated": True} if self.num_rotated else {}

    @classmethod
    def total(cls, usages: Iterable["Usage"]) -> "Usage":
        """What several runs took together."""
        counted = [astuple(usage) for usage in usages]
        return cls(*map(sum, zip(*counted, strict=True)))


@dataclass(frozen=True, slots=True)
class CallMetrics:
    """
    What a response took.

    Args:
        cached_tokens: of the prompt, which were not prefilled.
        prefill_s: until the first token, without what it waited. decode_s: from there.
        total_s: with what it waited.
        prefill_tps, decode_tps: tokens a second that were computed in these.
        peak_bytes, active_bytes: of the device's memory, of all requests together.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float
    total_s: float
    prefill_tps: float
    decode_tps: float
    peak_bytes: int
    active_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """
    The response is complete: comes once, last.

    Args:
        metrics: None: they were not asked for.
    """

    usage: Usage
    metrics: CallMetrics | None = None


@dataclass(slots=True)
class CollectedAnswer:
    """What the events of one choice come to."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: ChoiceFinished | None = None

    def take(self, event: "Event") -> None:
        """Note an event; what is no part of an answer is passed over."""
        if isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
            self.logprobs += event.logprobs
        elif isinstance(event, TextDelta):
            self.text.append(event.text)
            self.logprobs += event.logprobs
        elif isinstance(event, ToolCallEnded):
            self.calls.append(event.call)
        elif isinstance(event, ChoiceFinished):
            self.end = event


def broken_as_text(events: Iterable["Event"]) -> list["Event"]:
    """
    Events of a whole answer, a call whose arguments are no JSON as the text that it is.

    Nothing of it has been sent yet, and no tool may run on half its input.
    """
    whole: list[Event] = []
    num_calls: Counter[int] = Counter()
    for event in events:
        if isinstance(event, ToolCallEnded) and event.is_broken:
            whole = [e for e in whole if not _is_of_call(e, event)]
            text = f"{event.call.name} {event.call.arguments}"
            whole.append(TextDelta(event.choice, text))
        elif isinstance(event, ToolCallEnded):
            num_calls[event.choice] += 1
            whole.append(event)
        elif isinstance(event, ChoiceFinished) and not num_calls[event.choice]:
            is_left = event.reason != "tool_calls"
            whole.append(event if is_left else replace(event, reason="stop"))
        else:
            whole.append(event)
    return whole


def _is_of_call(event: "Event", ended: ToolCallEnded) -> bool:
    if not isinstance(event, ToolCallStarted | ToolCallArguments):
        return False
    return (event.choice, event.index) == (ended.choice, ended.index)


Event = (
    Loading
    | Idle
    | PrefillProgress
    | ReasoningDelta
    | ReasoningEnded
    | TextDelta
    | ToolCallStarted
    | ToolCallArguments
    | ToolCallEnded
    | ChoiceFinished
    | Finished
)
