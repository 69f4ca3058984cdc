"""Events -> OpenAI chat chunks: role, deltas, usage, finish."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from sidecar.protocols.openai_chat import (
    call_dict,
    logprobs_dict,
    new_id,
    usage_dict,
)

Frame = dict[str, Any]


class ChatChunks:
    """
    Makes the chunks of one response, all with one id.

    The finish chunks come last, after the usage chunk: LiteLLM throws away what
    follows a finish reason, and OpenAI's own clients do not mind the order.
    """

    def __init__(self, model: str, n: int, *, include_usage: bool) -> None:
        self._base = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._n = n
        self._include_usage = include_usage
        self._finishes: list[Frame] = []

    @property
    def keepalive(self) -> Frame:
        """A chunk that says nothing, for a silent time."""
        return self._chunk(0, {})

    def frames(self, events: Iterable[Event]) -> Iterator[Frame | None]:
        """Chunks in order; None for every idle moment."""
        for index in range(self._n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        for event in events:
            yield from self._frames_of(event)

    def _frames_of(self, event: Event) -> Iterator[Frame | None]:
        if isinstance(event, ReasoningDelta):
            yield self._chunk(
                event.choice, {"reasoning_content": event.text}, event.logprobs
            )
        elif isinstance(event, TextDelta):
            yield self._chunk(event.choice, {"content": event.text}, event.logprobs)
        elif isinstance(event, ToolCallDelta):
            call = {"index": event.index, **call_dict(event.call)}
            yield self._chunk(event.choice, {"tool_calls": [call]})
        elif isinstance(event, ChoiceFinished):
            self._finishes.append(self._chunk(event.choice, {}, reason=event.reason))
        elif isinstance(event, Finished):
            if self._include_usage:
                yield {**self._base, "choices": [], "usage": usage_dict(event.usage)}
            yield from self._finishes
        else:
            yield None

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: Any = (),
        reason: str | None = None,
    ) -> Frame:
        entry = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs_dict(logprobs),
            "finish_reason": reason,
        }
        return {**self._base, "choices": [entry]}
