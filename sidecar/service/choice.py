"""Engine events of one choice (of `n` answers) -> what the client is sent."""

from collections.abc import Callable, Sequence
from typing import Protocol

from sidecar.core.events import (
    ChoiceFinished,
    Event,
    FinishReason,
    ReasoningDelta,
    ReasoningEnded,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from sidecar.core.requests import Tool
from sidecar.engine.job import ChoiceEnded, Token
from sidecar.output.reasoning_splitter import Span, Splitter
from sidecar.output.tool_calls import extract_calls
from sidecar.output.tool_formats import ToolSyntax


class Choice(Protocol):
    """Turns one choice's tokens into events."""

    num_reasoning: int

    def feed(self, token: Token) -> list[Event]:
        """A sampled token."""

    def end(self, ended: ChoiceEnded) -> list[Event]:
        """The end; the last event is ChoiceFinished."""


class PlainChoice:
    """A raw completion: all text is content."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._logprobs: list[TokenLogprob] = []
        self.num_reasoning = 0

    def feed(self, token: Token) -> list[Event]:
        """A sampled token."""
        if token.logprob:
            self._logprobs.append(token.logprob)
        return self._text(token.text) if token.text else []

    def end(self, ended: ChoiceEnded) -> list[Event]:
        """The end of the text."""
        rest = self._text(ended.text) if ended.text or self._logprobs else []
        return [*rest, ChoiceFinished(self._index, ended.reason, ended.stop_string)]

    def _text(self, text: str) -> list[Event]:
        logprobs, self._logprobs = tuple(self._logprobs), []
        return [TextDelta(self._index, text, logprobs)]


class ChatChoice:
    """
    A chat answer: reasoning, content and tool calls are separated.

    Args:
        token_of: the token of a piece of thinking.
    """

    def __init__(
        self,
        index: int,
        splitter: Splitter,
        syntax: ToolSyntax,
        tools: Sequence[Tool],
        token_of: Callable[[str], str],
    ) -> None:
        self._index = index
        self._splitter = splitter
        self._syntax, self._tools = syntax, tools
        self._token_of = token_of
        self._thinking: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._has_content = False
        self.num_reasoning = 0

    def feed(self, token: Token) -> list[Event]:
        """A sampled token."""
        was_reasoning = self._splitter.is_reasoning
        spans = self._splitter.feed(token.text)
        if was_reasoning or self._splitter.is_reasoning:
            self.num_reasoning += 1
        if token.logprob:
            self._logprobs.append(token.logprob)
        return self._deltas(spans)

    def end(self, ended: ChoiceEnded) -> list[Event]:
        """The end: what was held back, the tool calls, the reason."""
        events = self._deltas(self._splitter.feed(ended.text))
        spans, buffer = self._splitter.flush()
        events += self._deltas(spans)
        extracted = extract_calls(
            buffer, self._syntax, self._tools, is_cut=ended.reason == "length"
        )
        if extracted.text:
            seam = "\n" if extracted.calls else self._splitter.held_space
            seam = seam if self._has_content else ""
            events += self._deltas([("content", seam + extracted.text)])
        if self._logprobs:
            events.append(TextDelta(self._index, "", tuple(self._logprobs)))
        events += self._end_thinking()
        events += [
            ToolCallDelta(self._index, number, call)
            for number, call in enumerate(extracted.calls)
        ]
        has_calls = extracted.calls and not extracted.is_cut
        reason: FinishReason = "tool_calls" if has_calls else ended.reason
        return [*events, ChoiceFinished(self._index, reason, ended.stop_string)]

    def _deltas(self, spans: list[Span]) -> list[Event]:
        events: list[Event] = []
        for kind, text in spans:
            logprobs, self._logprobs = tuple(self._logprobs), []
            if kind == "reasoning":
                self._thinking.append(text)
                events.append(ReasoningDelta(self._index, text, logprobs))
            else:
                self._has_content = True
                events += self._end_thinking()
                events.append(TextDelta(self._index, text, logprobs))
        return events

    def _end_thinking(self) -> list[Event]:
        if not self._thinking:
            return []
        thinking, self._thinking = "".join(self._thinking), []
        return [ReasoningEnded(self._index, self._token_of(thinking))]
