"""OpenAI's Chat Completions as a dialect."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.errors import SidecarError
from sidecar.core.events import Event
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import ChatRequest
from sidecar.dialects.litellm_header import with_client_facts
from sidecar.dialects.openai_chat.request import (
    StreamOptions,
    format_chat,
    parse_chat,
)
from sidecar.dialects.openai_chat.stream import ChatChunks, OpenAIStream
from sidecar.dialects.openai_chat.tools import custom_names
from sidecar.dialects.problem import CONTENT_TYPE, problem


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A body of `POST /v1/chat/completions`."""

    chat: ChatRequest
    how: StreamOptions

    def encoder(self) -> OpenAIStream:
        """Chunks."""
        chunks = ChatChunks(
            self.chat.model,
            self.chat.options.n,
            include_usage=self.how.include_usage,
            custom=custom_names(self.chat.tools),
            answer_id=self.chat.answer_id,
        )
        # Comments do not pass through LiteLLM.
        keepalive = chunks.keepalive if self.how.is_plugin else None
        return OpenAIStream(chunks, keepalive)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """A `chat.completion` object."""
        chat = self.chat
        return format_chat(events, chat.model, chat.options.n, chat.tools)


class OpenAIChat:
    """Chat Completions."""

    def parse(self, body: Any, facts: RequestFacts) -> ChatCall:
        """Check a body; complaints name the field."""
        whole = with_client_facts(body, facts.headers)
        agent = facts.headers.get("user-agent")
        return ChatCall(*parse_chat(whole, facts.request_id, agent))

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        """problem+json that is an OpenAI error body as well."""
        return CONTENT_TYPE, problem(error, request_id, path)
