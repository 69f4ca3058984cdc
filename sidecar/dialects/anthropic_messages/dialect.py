"""Anthropic's Messages API as a dialect."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.errors import SidecarError
from sidecar.core.events import Event
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import ChatRequest
from sidecar.dialects.anthropic_messages.answer import format_message
from sidecar.dialects.anthropic_messages.problem import problem
from sidecar.dialects.anthropic_messages.request import parse_messages
from sidecar.dialects.anthropic_messages.stream import MessageStream


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
