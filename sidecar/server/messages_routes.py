"""Anthropic's Messages API: endpoints."""

from sidecar.config.settings import ServerConfig
from sidecar.core.requests import ChatRequest
from sidecar.dialects.anthropic_messages.answer import format_message
from sidecar.dialects.anthropic_messages.request import parse_messages
from sidecar.dialects.anthropic_messages.stream import MessageStream
from sidecar.server import access
from sidecar.server.generating import collect, streamed
from sidecar.server.messages import (
    Endpoint,
    EventStream,
    Request,
    Response,
    json_response,
)
from sidecar.service.chat import ChatService


class MessagesRoutes:
    """The endpoints under /v1/messages."""

    def __init__(self, chat: ChatService, config: ServerConfig) -> None:
        self._chat = chat
        self._config = config
        self.table: dict[str, dict[str, Endpoint]] = {
            "/v1/messages": {"POST": self._create},
            "/v1/messages/count_tokens": {"POST": self._count},
        }

    def _create(self, request: Request) -> Response | EventStream:
        chat, stream = _parse(request)
        running = self._chat.start_chat(
            chat, self._config.timeout_chat_s, request.is_connected
        )
        is_shown = chat.thinking.is_shown
        if stream:
            encoder = MessageStream(chat.model, shows_thinking=is_shown)
            return streamed(encoder, running)
        events = collect(running, request)
        body = format_message(events, chat.model, shows_thinking=is_shown)
        return json_response(body, headers=running.headers)

    def _count(self, request: Request) -> Response:
        chat, _ = _parse(request)
        return json_response(
            {"input_tokens": self._chat.probe(chat, request.is_connected).prompt_tokens}
        )


def _parse(request: Request) -> tuple[ChatRequest, bool]:
    chat, stream = parse_messages(request.json(), request.request_id, request.headers)
    return chat.sent(request.path, access.key_id(request.headers)), stream
