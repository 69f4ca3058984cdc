"""OpenAI's Responses API: endpoints, and the store behind previous_response_id."""

from sidecar.config.settings import ServerConfig
from sidecar.core.requests import ChatRequest, short_id
from sidecar.dialects.openai_responses.answer import ResponseObject
from sidecar.dialects.openai_responses.request import (
    Delivery,
    input_items,
    parse_responses,
    responses_body,
)
from sidecar.dialects.openai_responses.stream import ResponseStream, whole_response
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
from sidecar.service.stored_responses import StoredResponses


class ResponsesRoutes:
    """The endpoints under /v1/responses."""

    def __init__(
        self, chat: ChatService, stored: StoredResponses, config: ServerConfig
    ) -> None:
        self._chat = chat
        self._stored = stored
        self._config = config
        self.table: dict[str, dict[str, Endpoint]] = {
            "/v1/responses": {"POST": self._create}
        }
        self.named: dict[str, Endpoint] = {"GET": self._get, "DELETE": self._delete}

    def _create(self, request: Request) -> Response | EventStream:
        chat, delivery = self._parse(request)
        key_id = chat.client.api_key_id

        def remember(response: ResponseObject) -> None:
            if delivery.is_stored:
                self._stored.put(key_id, delivery.items, response.as_dict())

        running = self._chat.start_chat(
            chat, self._config.timeout_chat_s, request.is_connected
        )
        if delivery.stream:
            return streamed(ResponseStream(delivery, remember), running)
        body = whole_response(collect(running, request), delivery, remember)
        return json_response(body, headers=running.headers)

    def _parse(self, request: Request) -> tuple[ChatRequest, Delivery]:
        body = responses_body(request.json(), request.headers)
        key_id = _key_id(body, request)
        previous = body.get("previous_response_id")
        items = self._stored.resolve(key_id, previous, input_items(body))
        chat, delivery = parse_responses(
            body, items, request.request_id, request.headers
        )
        return chat.sent(request.path, access.key_id(request.headers)), delivery

    def _get(self, request: Request) -> Response:
        key_id = access.key_id(request.headers)
        return json_response(self._stored.get(key_id, request.tail))

    def _delete(self, request: Request) -> Response:
        self._stored.delete(access.key_id(request.headers), request.tail)
        gone = {"id": request.tail, "object": "response", "deleted": True}
        return json_response(gone)


def _key_id(body: dict[str, object], request: Request) -> str | None:
    """Whose responses a request may refer to; as ChatRequest.sent has it."""
    private = body.get("x_mlx")
    named = private.get("key") if isinstance(private, dict) else None
    is_named = isinstance(named, str) and bool(named)
    return short_id(named) if is_named else access.key_id(request.headers)
