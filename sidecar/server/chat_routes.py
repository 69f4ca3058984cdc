"""A chat in any dialect: parse -> run -> stream, or collect -> whole."""

from collections.abc import Callable, Generator
from typing import Any

from sidecar.config.settings import ServerConfig
from sidecar.core.events import Event
from sidecar.core.ports import Call, Dialect, RunningChat
from sidecar.core.requests import ChatRequest
from sidecar.engine.job import Forecast
from sidecar.server.http_messages import (
    Endpoint,
    EventStream,
    Request,
    Response,
    collect,
    facts_of,
    json_response,
    streamed,
)
from sidecar.service.chat import ChatService
from sidecar.service.rate_limits import RateLimits


class ChatRoutes:
    """Makes endpoints of dialects."""

    def __init__(
        self, chat: ChatService, config: ServerConfig, limits: RateLimits
    ) -> None:
        self._chat, self._limits = chat, limits
        self.config = config

    def create(self, dialect: Dialect) -> Endpoint:
        """The endpoint that answers a chat."""

        def endpoint(request: Request) -> Response | EventStream:
            call, asked = _parse(dialect, request)
            if self._limits.is_on:
                self._limits.begin(asked.client.limited_as)
            if asked.is_streamed and not self._chat.is_loaded(asked):
                events = self._when_loaded(asked, request)
                return EventStream(call.encoder(), events, events.close)
            running = self._start(asked, request)
            if asked.is_streamed:
                return streamed(call.encoder(), running)
            body = call.whole(collect(running, request))
            return json_response(body, headers=running.headers)

        return endpoint

    def _start(self, asked: ChatRequest, request: Request) -> RunningChat:
        longest_s = self.config.timeout_chat_s
        return self._chat.start_chat(asked, longest_s, request.is_connected)

    def _when_loaded(
        self, asked: ChatRequest, request: Request
    ) -> Generator[Event, None, None]:
        """Tell of the load, then answer: what is refused now ends the stream."""
        yield from self._chat.loading(asked.model, self.config.timeout_chat_s)
        running = self._start(asked, request)
        try:
            yield from running.events()
        finally:
            running.close()

    def forecast(
        self, dialect: Dialect, said: Callable[[Forecast], dict[str, Any]]
    ) -> Endpoint:
        """The endpoint that tells what a chat would cost."""

        def endpoint(request: Request) -> Response:
            _, asked = _parse(dialect, request)
            return json_response(said(self._chat.probe(asked, request.is_connected)))

        return endpoint


def _parse(dialect: Dialect, request: Request) -> tuple[Call, ChatRequest]:
    facts = facts_of(request)
    call = dialect.parse(request.json(), facts)
    sent = call.chat.sent(
        request.path, facts.sender, facts.address, is_batch=facts.is_batch
    )
    return call, sent
