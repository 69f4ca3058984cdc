"""A chat in any dialect: parse -> run -> stream, or collect -> whole."""

from collections.abc import Callable
from typing import Any

from sidecar.config.settings import ServerConfig
from sidecar.core.ports import Call, Dialect, RequestFacts
from sidecar.core.requests import ChatRequest
from sidecar.engine.text import Forecast
from sidecar.server import access
from sidecar.server.messages import (
    Endpoint,
    EventStream,
    Request,
    Response,
    collect,
    json_response,
    streamed,
)
from sidecar.service.chat import ChatService


class ChatRoutes:
    """Makes endpoints of dialects."""

    def __init__(self, chat: ChatService, config: ServerConfig) -> None:
        self._chat = chat
        self._config = config

    def create(self, dialect: Dialect) -> Endpoint:
        """The endpoint that answers a chat."""

        def endpoint(request: Request) -> Response | EventStream:
            call, asked = _parse(dialect, request)
            running = self._chat.start_chat(
                asked, self._config.timeout_chat_s, request.is_connected
            )
            if asked.is_streamed:
                return streamed(call.encoder(), running)
            body = call.whole(collect(running, request))
            return json_response(body, headers=running.plan.headers)

        return endpoint

    def forecast(
        self, dialect: Dialect, said: Callable[[Forecast], dict[str, Any]]
    ) -> Endpoint:
        """The endpoint that tells what a chat would cost."""

        def endpoint(request: Request) -> Response:
            _, asked = _parse(dialect, request)
            return json_response(said(self._chat.probe(asked, request.is_connected)))

        return endpoint


def _parse(dialect: Dialect, request: Request) -> tuple[Call, ChatRequest]:
    sender = access.key_id(request.headers)
    facts = RequestFacts(request.request_id, request.path, request.headers, sender)
    call = dialect.parse(request.json(), facts)
    return call, call.chat.sent(request.path, sender)
