"""
The Messages API as a dialect: events -> its event stream.

    message_start ping
    [content_block_start content_block_delta* content_block_stop]*
    message_delta message_stop

One block is open at a time; a block opens at its first piece, and thinking ends with
its signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.errors import GenerationFailed, SidecarError
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    ReasoningDelta,
    ReasoningEnded,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from sidecar.core.json_bytes import dump_line
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import ChatRequest, ToolCall
from sidecar.dialects.anthropic_messages.answer import (
    format_message,
    new_message,
    stop_fields,
    tool_use,
    usage_dict,
)
from sidecar.dialects.anthropic_messages.problem import error_object, problem
from sidecar.dialects.anthropic_messages.request import parse_messages

_EMPTY = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageStream:
    """Encodes one message; a StreamEncoder."""

    def __init__(
        self, model: str, *, shows_thinking: bool, answer_id: str = ""
    ) -> None:
        self._model = model
        self._answer_id = answer_id
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: str | None = None
        self._stop: dict[str, Any] = {}

    def started(self, usage: Usage) -> bytes:
        """The message without blocks."""
        message = new_message(self._model, usage, self._answer_id)
        return _event("message_start", {"message": message}) + self.ping()

    def event(self, event: Event) -> bytes:
        """
        What an event comes to.

        Raises:
            GenerationFailed: a call is broken; no tool may run on half its input.
        """
        if isinstance(event, ToolCallStarted | ToolCallArguments | ToolCallEnded):
            return self._call(event)
        if isinstance(event, ReasoningDelta):
            text = event.text if self._shows_thinking else ""
            return self._piece("thinking", "thinking_delta", text)
        if isinstance(event, ReasoningEnded):
            return self._delta("signature_delta", "signature", event.token)
        if isinstance(event, TextDelta):
            return self._piece("text", "text_delta", event.text) if event.text else b""
        if isinstance(event, ChoiceFinished):
            self._stop = stop_fields(event)
        if isinstance(event, Finished):
            return self._finished(event.usage)
        return b""

    def ping(self) -> bytes:
        """An event that says nothing."""
        return _event("ping", {})

    def failed(self, error: SidecarError) -> bytes:
        """The error, and no `message_stop`."""
        return _event("error", {"error": error_object(error)})

    def _piece(self, kind: str, delta: str, text: str) -> bytes:
        opened = b"" if self._open == kind else self._start(kind, _EMPTY[kind])
        return opened + (self._delta(delta, kind, text) if text else b"")

    def _call(
        self, event: ToolCallStarted | ToolCallArguments | ToolCallEnded
    ) -> bytes:
        if isinstance(event, ToolCallStarted):
            call = ToolCall(event.id, event.name, "")
            return self._start("tool_use", tool_use(call, {}))
        if isinstance(event, ToolCallArguments):
            return self._delta("input_json_delta", "partial_json", event.text)
        if event.is_broken:
            raise GenerationFailed(f"the model's call of {event.call.name} is no JSON")
        return self._end()

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._end()
        self._index += 1
        self._open = kind
        fields = {"index": self._index, "content_block": block}
        return closed + _event("content_block_start", fields)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        fields = {"index": self._index, "delta": {"type": kind, name: text}}
        return _event("content_block_delta", fields)

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", {"index": self._index})

    def _finished(self, usage: Usage) -> bytes:
        opened = b"" if self._index >= 0 else self._start("text", _EMPTY["text"])
        fields = {"delta": self._stop, "usage": usage_dict(usage)}
        ending = _event("message_delta", fields) + _event("message_stop", {})
        return opened + self._end() + ending


def _event(name: str, fields: dict[str, Any]) -> bytes:
    data = dump_line({"type": name, **fields})
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A body of `POST /v1/messages`."""

    chat: ChatRequest

    def encoder(self) -> MessageStream:
        """Named events."""
        chat, is_shown = self.chat, self.chat.thinking.is_shown
        return MessageStream(
            chat.model, shows_thinking=is_shown, answer_id=chat.answer_id
        )

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """A message object."""
        is_shown = self.chat.thinking.is_shown
        return format_message(events, self.chat.model, shows_thinking=is_shown)


class AnthropicMessages:
    """The Messages API."""

    def parse(self, body: Any, facts: RequestFacts) -> MessagesCall:
        """Check a body; complaints name the field."""
        return MessagesCall(parse_messages(body, facts.request_id, facts.headers))

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        """Anthropic's form."""
        return "application/json", problem(error, request_id)
