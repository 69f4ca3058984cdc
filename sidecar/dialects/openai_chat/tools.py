"""The tools of a chat request, and their calls on the wire."""

import json
from dataclasses import replace
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Tool, ToolCall, ToolChoice
from sidecar.dialects.custom_tools import (
    CUSTOM_SCHEMA,
    custom_arguments,
    custom_input,
)
from sidecar.dialects.fields import Fields

_OFFERED = ("function", "custom")


def read_tools(fields: Fields) -> tuple[Tool, ...]:
    """The offered functions and custom tools; those a provider runs are left out."""
    tools = []
    for item in fields.objects("tools"):
        kind = _kind(item)
        if kind not in _OFFERED:
            continue
        if item.object(kind) is None:
            raise BadRequest(
                f"{item.path(kind)} must be an object", param=item.path(kind)
            )
        inner = Fields(item.raw(kind), item.path(kind))
        is_custom = kind == "custom"
        is_strict = not is_custom and inner.boolean("strict", False)
        tool = _tool(inner, is_custom=is_custom)
        param = "tools[].function.strict" if is_strict else ""
        tools.append(replace(tool, strict_param=param))
    tools += [_tool(item) for item in fields.objects("functions")]
    return tuple(tools)


def left_out_tools(fields: Fields) -> tuple[str, ...]:
    """Tools that only a provider runs, by their types."""
    kinds = map(_kind, fields.objects("tools"))
    return tuple(f"tools[{kind[:40]}]" for kind in kinds if kind not in _OFFERED)


def _kind(item: Fields) -> str:
    return item.text("type") or "function"


def read_tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """Which tools may or must be called."""
    legacy = fields.raw("tool_choice") is None
    name = "function_call" if legacy else "tool_choice"
    value = fields.raw(name)
    if value is None or value == "auto":
        return ToolChoice("auto")
    if value == "none":
        return ToolChoice("none")
    if value in ("required", "any"):
        return ToolChoice("required")
    return _named_choice(value, tools, name)


def _named_choice(value: Any, tools: tuple[Tool, ...], param: str) -> ToolChoice:
    kinds = (*_OFFERED, None)
    named = isinstance(value, dict) and value.get("type") in kinds
    inner = next((value[k] for k in _OFFERED if k in value), value) if named else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise BadRequest(
            f"{param} must be none, auto, required or name a function", param=param
        )
    if name not in {tool.name for tool in tools}:
        raise BadRequest(
            f"{param} names {name[:64]!r}, which is not among the tools", param=param
        )
    return ToolChoice("named", name)


def _tool(function: Fields, *, is_custom: bool = False) -> Tool:
    name = function.required_text("name")
    given = None if is_custom else function.printable_object("parameters")
    parameters = given or (
        CUSTOM_SCHEMA if is_custom else {"type": "object", "properties": {}}
    )
    raw = {
        "name": name,
        "description": function.text("description") or "",
        "parameters": parameters,
    }
    return Tool(name, parameters, {"type": "function", "function": raw}, is_custom)


def read_tool_calls(item: Fields) -> tuple[ToolCall, ...]:
    """The calls of an assistant message, the legacy `function_call` among them."""
    calls = [_tool_call(call) for call in item.objects("tool_calls")]
    legacy = item.object("function_call")
    if legacy is not None and not calls:
        calls = [_function_call(Fields(legacy, item.path("function_call")), "")]
    return tuple(calls)


def _tool_call(call: Fields) -> ToolCall:
    call_id = call.text("id") or ""
    if call.text("type") == "custom":
        custom = Fields(call.raw("custom"), call.path("custom"))
        text = custom.text("input") or ""
        return ToolCall(call_id, custom.required_text("name"), custom_arguments(text))
    return _function_call(Fields(call.raw("function"), call.path("function")), call_id)


def _function_call(function: Fields, call_id: str) -> ToolCall:
    arguments = function.raw("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call_id, function.required_text("name"), arguments)


def custom_names(tools: tuple[Tool, ...]) -> frozenset[str]:
    """The tools whose calls carry bare text."""
    return frozenset(tool.name for tool in tools if tool.is_custom)


def call_dict(call: ToolCall, custom: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    if call.name in custom:
        inner = {"name": call.name, "input": custom_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": inner}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
