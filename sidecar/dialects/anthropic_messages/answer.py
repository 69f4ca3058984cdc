"""A finished generation as a message object, and the parts that streams share."""

import secrets
from collections.abc import Iterable
from typing import Any

from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    ReasoningDelta,
    ReasoningEnded,
    TextDelta,
    ToolCallEnded,
    Usage,
    broken_as_text,
)
from sidecar.core.json_bytes import load_json
from sidecar.core.requests import ToolCall

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def new_id() -> str:
    """A random id of a message."""
    return "msg_" + secrets.token_hex(12)


def new_message(model: str, usage: Usage, answer_id: str = "") -> dict[str, Any]:
    """A message object before its first block."""
    return {
        "id": answer_id or new_id(),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_dict(usage),
    }


def format_message(
    events: Iterable[Event], model: str, *, shows_thinking: bool
) -> dict[str, Any]:
    """The message object of a finished generation."""
    message = new_message(model, Usage(0, 0, 0, 0))
    blocks: list[dict[str, Any]] = message["content"]
    for event in broken_as_text(events):
        if isinstance(event, ChoiceFinished):
            message |= stop_fields(event)
        elif isinstance(event, Finished):
            message["usage"] = usage_dict(event.usage)
        else:
            _add(blocks, event, shows_thinking=shows_thinking)
    if not blocks:
        blocks.append({"type": "text", "text": ""})
    return message


def _add(blocks: list[dict[str, Any]], event: Event, *, shows_thinking: bool) -> None:
    """What an event adds to the blocks."""
    if isinstance(event, ReasoningDelta):
        _extend(blocks, "thinking", event.text if shows_thinking else "")
    elif isinstance(event, ReasoningEnded):
        blocks[-1]["signature"] = event.token
    elif isinstance(event, TextDelta) and event.text:
        _extend(blocks, "text", event.text)
    elif isinstance(event, ToolCallEnded):
        blocks.append(tool_use(event.call, parse_input(event.call.arguments)))


def _extend(blocks: list[dict[str, Any]], kind: str, text: str) -> None:
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append({"type": kind, kind: ""})
    blocks[-1][kind] += text


def stop_fields(finished: ChoiceFinished) -> dict[str, Any]:
    """Why it ended."""
    if finished.stop_string is not None and finished.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
    return {"stop_reason": _STOP_REASONS[finished.reason], "stop_sequence": None}


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Token counts in Anthropic's form: what was read from the cache counts apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **usage.rotated_field,
    }


def tool_use(call: ToolCall, value: dict[str, Any]) -> dict[str, Any]:
    """A call as a block."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def parse_input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; text that is none is kept under `raw`."""
    try:
        value = load_json(arguments) if arguments.strip() else {}
    except ValueError:
        return {"raw": arguments}
    return value if isinstance(value, dict) else {"raw": arguments}
