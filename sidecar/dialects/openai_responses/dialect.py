"""OpenAI's Responses API as a dialect."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sidecar.core.errors import SidecarError
from sidecar.core.events import Event
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import ChatRequest, short_id
from sidecar.dialects.openai_responses.answer import ResponseObject
from sidecar.dialects.openai_responses.request import (
    Delivery,
    input_items,
    parse_responses,
    responses_body,
)
from sidecar.dialects.openai_responses.stream import ResponseStream, whole_response
from sidecar.dialects.problem import CONTENT_TYPE, problem


class StoredItems(Protocol):
    """What later requests may name as their previous response."""

    @property
    def generation(self) -> int:
        """How often something was forgotten."""

    def put(
        self,
        key_id: str | None,
        items: Sequence[Any],
        body: dict[str, Any],
        generation: int | None = None,
        session: str | None = None,
    ) -> None:
        """Keep a complete response, with its input, unless it was forgotten since."""

    def resolve(
        self, key_id: str | None, previous: object, items: Sequence[Any]
    ) -> list[Any]:
        """A request's whole input: what its previous response stands for, its own."""


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A body of `POST /v1/responses`."""

    chat: ChatRequest
    delivery: Delivery
    key_id: str | None
    stored: StoredItems
    generation: int

    def encoder(self) -> ResponseStream:
        """Named, numbered events."""
        return ResponseStream(self.delivery, self._remember)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """A response object."""
        return whole_response(events, self.delivery, self._remember)

    def _remember(self, response: ResponseObject) -> None:
        if self.delivery.is_stored:
            body, session = response.as_dict(), self.chat.client.session
            items, generation = self.delivery.items, self.generation
            self.stored.put(self.key_id, items, body, generation, session)


class OpenAIResponses:
    """The Responses API."""

    def __init__(self, stored: StoredItems) -> None:
        self._stored = stored

    def parse(self, body: Any, facts: RequestFacts) -> ResponsesCall:
        """Check a body; complaints name the field."""
        whole = responses_body(body, facts.headers)
        key_id = _key_id(whole, facts)
        previous = whole.get("previous_response_id")
        generation = self._stored.generation
        items = self._stored.resolve(key_id, previous, input_items(whole))
        chat, delivery = parse_responses(whole, items, facts.request_id, facts.headers)
        return ResponsesCall(chat, delivery, key_id, self._stored, generation)

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        """problem+json that is an OpenAI error body as well."""
        return CONTENT_TYPE, problem(error, request_id, path)


def _key_id(body: dict[str, Any], facts: RequestFacts) -> str | None:
    """Whose responses a request may refer to; as ChatRequest.sent has it."""
    private = body.get("x_mlx")
    named = private.get("key") if isinstance(private, dict) else None
    is_named = isinstance(named, str) and bool(named)
    return short_id(named) if is_named else facts.sender
