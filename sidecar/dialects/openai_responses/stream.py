"""
The Responses API as a dialect: events -> its event stream.

    response.created response.in_progress
    [output_item.added <its parts and deltas> output_item.done]*
    response.completed | response.incomplete | response.failed

One item is open at a time; `sequence_number` counts all events from 0.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sidecar.core.errors import SidecarError
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    ReasoningDelta,
    ReasoningEnded,
    TextDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
    broken_as_text,
)
from sidecar.core.json_bytes import dump_line
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import ChatRequest, ToolCall, short_id
from sidecar.dialects.openai_chat.request import logprobs_dict
from sidecar.dialects.openai_responses.answer import (
    Item,
    OutputItems,
    ResponseObject,
    output_text,
)
from sidecar.dialects.openai_responses.request import (
    Delivery,
    input_items,
    parse_responses,
    responses_body,
)
from sidecar.dialects.problem import CONTENT_TYPE, problem

_COMMENT = b": keepalive\n\n"
_SUMMARY = {"type": "summary_text", "text": ""}
_REASONING = {"type": "reasoning_text", "text": ""}


class ResponseStream:
    """
    Encodes one response; a StreamEncoder.

    Args:
        remember: called with the complete response.

    Attributes:
        response: the response as far as it has come.
    """

    def __init__(
        self, delivery: Delivery, remember: Callable[[ResponseObject], None]
    ) -> None:
        self.response = ResponseObject(delivery)
        self._items = OutputItems(delivery)
        self._wants_summary = delivery.wants_summary
        self._remember = remember
        self._item: Item = {}
        self._arguments: list[str] = []  # of the call that is being written
        self._number = 0

    def started(self, usage: Usage) -> bytes:
        """The response without output."""
        whole = {"response": self.response.as_dict()}
        created = self._event("response.created", whole)
        return created + self._event("response.in_progress", whole)

    def event(self, event: Event) -> bytes:
        """What an event comes to."""
        data = b""
        if isinstance(event, ReasoningDelta):
            data = self._piece("reasoning", event.text)
        elif isinstance(event, ReasoningEnded):
            data = self._end(event.token)
        elif isinstance(event, TextDelta) and event.text:
            data = self._piece("message", event.text, event.logprobs)
        elif isinstance(event, ToolCallStarted):
            data = self._end() + self._begin_call(event)
        elif isinstance(event, ToolCallArguments) and self._item:
            self._arguments.append(event.text)
            name = "response.function_call_arguments.delta"
            data = self._of_item(name, {"delta": event.text})
        elif isinstance(event, ToolCallEnded):
            data = self._end_call(event) if self._item else self._call(event.call)
        elif isinstance(event, ChoiceFinished):
            self.response.finish(event.reason)
            is_cut = event.reason == "length"
            data = self._end(is_cut=is_cut) + (b"" if is_cut else self._end_half_call())
        elif isinstance(event, Finished):
            data = self._finished(event.usage)
        return data

    def ping(self) -> bytes:
        """A comment: this stream has no event that says nothing."""
        return _COMMENT

    def failed(self, error: SidecarError) -> bytes:
        """The response as failed."""
        self.response.fail(error)
        return self._event("response.failed", {"response": self.response.as_dict()})

    def _piece(
        self, kind: str, text: str, sampled: Sequence[TokenLogprob] = ()
    ) -> bytes:
        opened = b""
        if self._items.kind != kind:
            opened, sampled = self._end() + self._begin(kind), _of_text(text, sampled)
        logprobs_json = logprobs_dict(sampled) or {"content": []}
        logprobs = logprobs_json["content"]
        self._items.add(text, logprobs)
        name, place = self._names(kind)
        if kind == "message":
            place = {**place, "logprobs": logprobs}
        return opened + self._of_item(f"{name}.delta", {**place, "delta": text})

    def _begin(self, kind: str) -> bytes:
        self._item = self._items.begin(kind)
        added = self._added(self._item)
        if kind == "message":
            part = {"content_index": 0, "part": output_text("")}
            return added + self._of_item("response.content_part.added", part)
        if self._wants_summary:
            part = {"summary_index": 0, "part": _SUMMARY}
            return added + self._of_item("response.reasoning_summary_part.added", part)
        part = {"content_index": 0, "part": _REASONING}
        return added + self._of_item("response.content_part.added", part)

    def _end(self, token: str | None = None, *, is_cut: bool = False) -> bytes:
        kind, text = self._items.kind, self._items.text
        if kind is None:
            return b""
        item, logprobs = self._items.end(token, is_cut=is_cut), self._items.logprobs
        name, place = self._names(kind)
        if kind == "message":
            place = {**place, "logprobs": logprobs}
        done = self._of_item(f"{name}.done", {**place, "text": text})
        if kind == "message":
            part = {"content_index": 0, "part": output_text(text, logprobs)}
            done += self._of_item("response.content_part.done", part)
        elif self._wants_summary:
            part = {"summary_index": 0, "part": {**_SUMMARY, "text": text}}
            done += self._of_item("response.reasoning_summary_part.done", part)
        else:
            part = {"content_index": 0, "part": {**_REASONING, "text": text}}
            done += self._of_item("response.content_part.done", part)
        return done + self._done(item)

    def _names(self, kind: str) -> tuple[str, dict[str, Any]]:
        """The event of an item's text, and where in the item the text stands."""
        if kind == "message":
            return "response.output_text", {"content_index": 0}
        if self._wants_summary:
            return "response.reasoning_summary_text", {"summary_index": 0}
        return "response.reasoning_text", {"content_index": 0}

    def _begin_call(self, event: ToolCallStarted) -> bytes:
        """Show the head of a call whose arguments are sent as they come."""
        if self._items.is_sent_whole(event.name):
            self._item = {}
            return b""
        item = self._items.call(ToolCall(event.id, event.name, ""))
        self._item, self._arguments = {**item, "status": "in_progress"}, []
        return self._added(self._item)

    def _end_half_call(self) -> bytes:
        """A call in which the model ended: clients do not complete what is open."""
        if self._item.get("type") != "function_call":
            return b""
        arguments = "".join(self._arguments)
        item = {**self._item, "status": "incomplete", "arguments": arguments}
        return self._done(item)

    def _end_call(self, event: ToolCallEnded) -> bytes:
        item = self._items.call(event.call, self._item["id"])
        fields = {"arguments": item["arguments"], "name": item["name"]}
        done = self._of_item("response.function_call_arguments.done", fields)
        return done + self._done(item)

    def _call(self, call: ToolCall) -> bytes:
        """A whole call of a custom tool, or of one that the client runs."""
        item = self._items.call(call)
        if item["type"] not in ("function_call", "custom_tool_call"):
            # Of the items of other tools clients read the last form alone.
            return self._added({**item, "status": "in_progress"}) + self._done(item)
        is_custom = item["type"] == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        name = "custom_tool_call_input" if is_custom else "function_call_arguments"
        self._item = {**item, "status": "in_progress", field: ""}
        added = self._added(self._item)
        delta = self._of_item(f"response.{name}.delta", {"delta": item[field]})
        fields = {field: item[field], "name": item["name"]}
        done = self._of_item(f"response.{name}.done", fields)
        return added + delta + done + self._done(item)

    def _finished(self, usage: Usage) -> bytes:
        self.response.count(usage)
        self._remember(self.response)
        whole = self.response.as_dict()
        return self._event(f"response.{whole['status']}", {"response": whole})

    def _added(self, item: Item) -> bytes:
        index = len(self.response.output)
        fields = {"output_index": index, "item": item}
        return self._event("response.output_item.added", fields)

    def _done(self, item: Item) -> bytes:
        fields = {"output_index": len(self.response.output), "item": item}
        self.response.output.append(item)
        self._item = {}
        return self._event("response.output_item.done", fields)

    def _of_item(self, name: str, fields: dict[str, Any]) -> bytes:
        index = len(self.response.output)
        place = {"item_id": self._item["id"], "output_index": index}
        return self._event(name, {**place, **fields})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        data = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), dump_line(data))


def _of_text(text: str, sampled: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """The tokens of a text, less those of a marker before it that is not shown."""
    said = ""
    for place in range(len(sampled) - 1, -1, -1):
        said = sampled[place].token + said
        if text in said:
            return sampled[place:]
    return sampled


def whole_response(
    events: Iterable[Event],
    delivery: Delivery,
    remember: Callable[[ResponseObject], None],
) -> dict[str, Any]:
    """The response of a finished generation, made as a stream makes it."""
    stream = ResponseStream(delivery, remember)
    for event in broken_as_text(events):
        stream.event(event)
    return stream.response.as_dict()


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
    """The key whose responses a request may refer to; as ChatRequest.sent has it."""
    private = body.get("x_mlx")
    named = private.get("key") if isinstance(private, dict) else None
    is_named = isinstance(named, str) and bool(named)
    return short_id(named) if is_named else facts.sender
