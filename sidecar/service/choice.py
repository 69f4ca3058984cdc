"""Engine events of one choice (of `n` answers) -> what the client is sent."""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from sidecar.core.errors import AnswerInvalid
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    FinishReason,
    ReasoningDelta,
    ReasoningEnded,
    TextDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from sidecar.core.requests import ToolCall
from sidecar.engine.job import ChoiceEnded, Token
from sidecar.output.pieces import CallArguments, CallPart, CallStarted, Piece, Splitter

_OF_SHORT_IDS = string.ascii_letters + string.digits


class Choice(Protocol):
    """
    Turns one choice's tokens into events.

    Attributes:
        num_reasoning: tokens of thinking. is_all_shown: False: something that the model
            wrote is not sent.
    """

    num_reasoning: int
    is_all_shown: bool

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
        self.is_all_shown = True

    def feed(self, token: Token) -> list[Event]:
        """A sampled token."""
        if token.logprob:
            self._logprobs.append(token.logprob)
        return self._text(token.text) if token.text else []

    def end(self, ended: ChoiceEnded) -> list[Event]:
        """The end of the text."""
        rest = self._text(ended.text) if ended.text or self._logprobs else []
        return [*rest, _finished(self._index, ended.reason, ended)]

    def _text(self, text: str) -> list[Event]:
        logprobs, self._logprobs = tuple(self._logprobs), []
        return [TextDelta(self._index, text, logprobs)]


class ChatChoice:
    """
    A chat answer: reasoning, content and calls are separated. Each call has a new id.

    Args:
        is_single: its client wants no more than one call: more are not sent.
        token_of: the token of a piece of thinking.
        must_call: its grammar lets nothing but calls through.
        has_short_ids: calls are named as Mistral names them, by nine characters.
    """

    def __init__(
        self,
        index: int,
        splitter: Splitter,
        token_of: Callable[[str], str],
        *,
        is_single: bool = False,
        must_call: bool = False,
        has_short_ids: bool = False,
    ) -> None:
        self._has_short_ids = has_short_ids
        self._is_single = is_single
        self._must_call = must_call
        self.is_all_shown = True
        self._index = index
        self._splitter = splitter
        self._token_of = token_of
        self._thinking: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_calls = 0
        self._has_read = False  # a call that is whole
        self._call = ToolCall("", "", "")  # the one that is being written
        self._arguments: list[str] = []
        self.num_reasoning = 0

    def feed(self, token: Token) -> list[Event]:
        """A sampled token."""
        was_reasoning = self._splitter.is_reasoning
        pieces = self._splitter.feed(token.text)
        if was_reasoning or self._splitter.is_reasoning:
            self.num_reasoning += 1
        if token.logprob:
            self._logprobs.append(token.logprob)
        return self._events(pieces)

    def end(self, ended: ChoiceEnded) -> list[Event]:
        """
        The end: what was held back, and the reason.

        Raises:
            AnswerInvalid: what had to be a call is none to those who read it.
        """
        events = self._events(self._splitter.feed(ended.text))
        is_cut = ended.reason == "length" or ended.stop_string is not None
        pieces, is_unfinished = self._splitter.flush(is_cut=is_cut)
        self.is_all_shown &= not is_unfinished
        events += self._events(pieces)
        if self._logprobs:
            events.append(TextDelta(self._index, "", tuple(self._logprobs)))
        events += self._end_thinking()
        has_calls = self._num_calls > 0 and not is_unfinished
        is_ended = not (is_cut or ended.is_aborted)
        if self._must_call and is_ended and not self._has_read:
            said = "the call that had to be made cannot be read"
            raise AnswerInvalid(said, param="tool_choice")
        reason: FinishReason = "tool_calls" if has_calls else ended.reason
        return [*events, _finished(self._index, reason, ended)]

    def _events(self, pieces: Sequence[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if not isinstance(piece, tuple):
                if self._is_single and self._num_calls:
                    self.is_all_shown = False
                    continue
                events += self._end_thinking()
                events.append(self._of_call(piece))
                continue
            kind, text = piece
            logprobs, self._logprobs = tuple(self._logprobs), []
            if kind == "reasoning":
                self._thinking.append(text)
                events.append(ReasoningDelta(self._index, text, logprobs))
            else:
                events += self._end_thinking()
                events.append(TextDelta(self._index, text, logprobs))
        return events

    def _of_call(self, part: CallPart) -> Event:
        number = self._num_calls
        if isinstance(part, CallStarted):
            self._call = ToolCall(self._new_id(), part.name, "")
            self._arguments = []
            return ToolCallStarted(self._index, number, self._call.id, part.name)
        if isinstance(part, CallArguments):
            self._arguments.append(part.text)
            return ToolCallArguments(self._index, number, part.text)
        self._num_calls += 1
        self._has_read |= not part.is_broken
        call = replace(self._call, arguments="".join(self._arguments))
        return ToolCallEnded(self._index, number, call, part.is_broken)

    def _new_id(self) -> str:
        """Mistral's own API takes no others, if its router goes on there."""
        if self._has_short_ids:
            return "".join(secrets.choice(_OF_SHORT_IDS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _end_thinking(self) -> list[Event]:
        if not self._thinking:
            return []
        thinking, self._thinking = "".join(self._thinking), []
        return [ReasoningEnded(self._index, self._token_of(thinking))]


def _finished(index: int, reason: FinishReason, ended: ChoiceEnded) -> ChoiceFinished:
    return ChoiceFinished(index, reason, ended.stop_string, ended.token_ids)
