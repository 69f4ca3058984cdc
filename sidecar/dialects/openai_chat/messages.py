"""The `messages` and `tools` of an OpenAI chat request."""

import json
import logging
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, Role, Tool, ToolCall, ToolChoice
from sidecar.dialects.fields import Fields

logger = logging.getLogger(__name__)

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_THINKING_PARTS = ("thinking", "reasoning")


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """
    The conversation, at least one message.

    Raises:
        BadRequest: naming the message and the field.
    """
    messages = tuple(_message(item) for item in fields.objects("messages"))
    if not messages:
        raise BadRequest("messages must be a non-empty list", param="messages")
    return messages


def read_tools(fields: Fields) -> tuple[Tool, ...]:
    """The offered functions; tools of types unknown here are left out."""
    tools = []
    for item in fields.objects("tools"):
        kind = item.text("type") or "function"
        if kind != "function":
            logger.info("ignored a tool type=%r", kind[:40])
            continue
        if item.object("function") is None:
            raise BadRequest(
                f"{item.path('function')} must be an object",
                param=item.path("function"),
            )
        tools.append(_tool(Fields(item.raw("function"), item.path("function"))))
    tools += [_tool(item) for item in fields.objects("functions")]
    return tuple(tools)


def read_tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """Which tools may or must be called."""
    value = fields.raw("tool_choice")
    if value is None:
        value = fields.raw("function_call")
    if value is None or value == "auto":
        return ToolChoice("auto")
    if value == "none":
        return ToolChoice("none")
    if value in ("required", "any"):
        return ToolChoice("required" if tools else "auto")
    return _named_choice(value, tools)


def _named_choice(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequest(
            "tool_choice must be none, auto, required or name a function",
            param="tool_choice",
        )
    if name not in {tool.name for tool in tools}:
        raise BadRequest(
            f"tool_choice names {name[:64]!r}, which is not among the tools",
            param="tool_choice",
        )
    return ToolChoice("named", name)


def _tool(function: Fields) -> Tool:
    name = function.required_text("name")
    parameters = function.printable_object("parameters") or {
        "type": "object",
        "properties": {},
    }
    raw = {
        "name": name,
        "description": function.text("description") or "",
        "parameters": parameters,
    }
    return Tool(name, parameters, {"type": "function", "function": raw})


def _message(item: Fields) -> Message:
    role = _ROLES.get(item.required_text("role"))
    if role is None:
        raise BadRequest(
            f"{item.path('role')} must be one of {', '.join(_ROLES)}",
            param=item.path("role"),
        )
    parts, thoughts = _content(item)
    return Message(
        role=role,
        parts=parts,
        reasoning=_reasoning(item, thoughts) if role == "assistant" else None,
        tool_calls=_tool_calls(item) if role == "assistant" else (),
        tool_call_id=item.text("tool_call_id") if role == "tool" else None,
    )


def _content(item: Fields) -> tuple[tuple[str, ...], list[str]]:
    """Text parts, and thinking that came as parts."""
    value = item.raw("content")
    if value is None:
        return (), []
    if isinstance(value, str):
        return (value,), []
    if not isinstance(value, list):
        raise BadRequest(
            f"{item.path('content')} must be a string or a list of parts",
            param=item.path("content"),
        )
    parts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(value):
        path = f"{item.path('content')}[{index}]"
        if isinstance(part, str):
            parts.append(part)
        else:
            _part(Fields(part, path), parts, thoughts)
    return tuple(parts), thoughts


def _part(part: Fields, parts: list[str], thoughts: list[str]) -> None:
    kind = part.text("type") or "text"
    if kind in _TEXT_PARTS:
        parts.append(part.text("text") or part.text("refusal") or "")
    elif kind in _THINKING_PARTS:
        thoughts.append(part.text("thinking") or part.text("text") or "")
    elif kind != "redacted_thinking":
        raise BadRequest(
            f"{part.path('type')} is {kind[:40]!r}: this model takes text only",
            param=part.path("type"),
        )


def _reasoning(item: Fields, thoughts: list[str]) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        value = item.raw(name)
        if isinstance(value, str):
            return value
    blocks = [
        block.text("thinking") or ""
        for block in item.objects("thinking_blocks")
        if block.raw("type") in (None, "thinking")
    ]
    found = [text for text in (blocks or thoughts) if text]
    return "\n".join(found) if found else None


def _tool_calls(item: Fields) -> tuple[ToolCall, ...]:
    calls = []
    for call in item.objects("tool_calls"):
        function = Fields(call.raw("function"), call.path("function"))
        arguments = function.raw("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = function.required_text("name")
        calls.append(ToolCall(call.text("id") or "", name, arguments))
    return tuple(calls)
