"""The body of `POST /v1/responses` -> a chat request."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from sidecar.core.errors import BadRequest
from sidecar.core.requests import ChatRequest, ClientInfo, Message
from sidecar.dialects.fields import Fields, ignored_fields
from sidecar.dialects.generation_fields import (
    read_client,
    read_options,
    read_thinking,
    with_one_call,
)
from sidecar.dialects.known_fields import RESPONSES_FIELDS
from sidecar.dialects.litellm_header import with_client_facts
from sidecar.dialects.openai_responses.items import ReadItems, read_items
from sidecar.dialects.openai_responses.tools import (
    WireNames,
    is_choice_kept,
    read_tool_choice,
    read_tools,
)
from sidecar.dialects.output_format import read_text_format

_LOGPROBS = "message.output_text.logprobs"
_SESSION_HEADERS = ("session-id", "session_id")
# Sent back as they came.
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
    "user",
)


@dataclass(frozen=True, slots=True)
class Delivery:
    """
    How a response is written.

    Args:
        wants_summary: thinking goes into summaries; else into content.
        is_stored: later requests may name it as their previous one.
        items: its input, what came before included.
        echoed: fields of the request that the response repeats.
    """

    model: str
    stream: bool
    wants_summary: bool
    is_stored: bool
    items: tuple[Any, ...]
    names: WireNames
    echoed: Mapping[str, Any]
    answer_id: str = field(default_factory=lambda: "resp_" + secrets.token_hex(16))


def responses_body(body: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """
    The body with what LiteLLM cut from it (dialects/litellm_header).

    Raises:
        BadRequest: it cannot be sent back, as responses repeat parts of it.
    """
    whole = with_client_facts(body, headers)
    try:
        orjson.dumps(whole)
    except TypeError:
        raise BadRequest("the body is nested too deeply to be repeated") from None
    return whole


def input_items(body: Mapping[str, Any]) -> list[Any]:
    """The request's own input as items; a string is one user message."""
    value = body.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRequest("input must be a string or a non-empty list", param="input")
    return value


def parse_responses(
    body: dict[str, Any],
    items: list[Any],
    request_id: str,
    headers: Mapping[str, str],
) -> tuple[ChatRequest, Delivery]:
    """
    Check a request body.

    Args:
        body: from `responses_body`. items: its input, what it refers to put in.
    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    if fields.boolean("background", False):
        raise BadRequest(
            "background must be false: nothing runs later here", param="background"
        )
    _refuse_kept_elsewhere(fields)
    offer = read_tools(fields)
    delivery = _delivery(fields, body, items, offer.names)
    said = read_items(Fields(item, f"input[{i}]") for i, item in enumerate(items))
    request = ChatRequest(
        request_id=request_id,
        model=fields.text("model") or "",
        messages=_messages(fields, said),
        tools=offer.tools,
        tool_choice=with_one_call(read_tool_choice(fields, offer.tools), fields),
        output_format=read_text_format(fields, "text", is_strict=False),
        thinking=read_thinking(body),
        options=read_options(_options(body), _top_logprobs(fields)),
        client=_client(body, headers),
        is_streamed=delivery.stream,
        ignored=(
            *ignored_fields(body, RESPONSES_FIELDS),
            *(f"tools[{kind}]" for kind in offer.hosted),
            *(f"input[{kind}]" for kind in said.unread),
            *(() if is_choice_kept(fields) else ("tool_choice",)),
        ),
        answer_id=delivery.answer_id,
    )
    return request, delivery


def _refuse_kept_elsewhere(fields: Fields) -> None:
    """What only OpenAI has: conversations, and prompts that are named."""
    for name in ("conversation", "prompt"):
        if fields.raw(name) is not None:
            raise BadRequest(
                f"{name} is not served here: send the items themselves, or name a "
                "previous_response_id",
                param=name,
            )


def _messages(fields: Fields, said: ReadItems) -> tuple[Message, ...]:
    instructions = fields.text("instructions")
    first = [Message("system", (instructions,))] if instructions else []
    if not said.messages:
        raise BadRequest("input must hold a message", param="input")
    return (*first, *said.messages)


def _delivery(
    fields: Fields, body: Mapping[str, Any], items: list[Any], names: WireNames
) -> Delivery:
    reasoning = fields.object("reasoning") or {}
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    return Delivery(
        model=fields.text("model") or "",
        stream=fields.boolean("stream", False),
        wants_summary=bool(summary) and summary != "none",
        is_stored=fields.boolean("store", True),
        items=tuple(items),
        names=names,
        echoed={name: body[name] for name in _ECHOED if name in body},
    )


def _options(body: Mapping[str, Any]) -> Fields:
    """The options under the names that all formats share."""
    shared = {**body, "max_tokens": body.get("max_output_tokens"), "n": None}
    return Fields(shared, sent_as={"max_tokens": "max_output_tokens"})


def _top_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, 20)
    wanted = _LOGPROBS in fields.items("include")
    return (top or 0) if wanted or top else None


def _client(body: dict[str, Any], headers: Mapping[str, str]) -> ClientInfo:
    """Codex has one session for a talk and its sub-agents, and a name for each."""
    client = read_client(body, headers.get("user-agent"))
    metadata = body.get("client_metadata")
    inner = metadata if isinstance(metadata, dict) else {}
    if client.session is None:
        named = {f"header {name}": headers.get(name) for name in _SESSION_HEADERS}
        named["client_metadata.session_id"] = inner.get("session_id")
        client = client.with_session(named)
    thread = inner.get("thread_id")
    if isinstance(thread, str) and thread and thread != client.session:
        return replace(client, thread=thread)
    return client
