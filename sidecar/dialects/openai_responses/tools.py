"""The tools of a Responses request, and how their calls are named on the wire."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Tool, ToolCall, ToolChoice
from sidecar.dialects.custom_tools import CUSTOM_SCHEMA, custom_input
from sidecar.dialects.fields import Fields
from sidecar.dialects.openai_responses.client_tools import (
    CLIENT_TOOLS,
    ClientTool,
    client_tool,
)


@dataclass(frozen=True, slots=True)
class WireName:
    """
    A tool as the client knows it.

    Args:
        is_custom: its calls carry bare text.
        client_tool: its calls are items of a type of their own.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False
    client_tool: ClientTool | None = None


WireNames = dict[str, WireName]  # by the name that the model is given


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """The offered functions; `hosted`: types of tools that OpenAI's servers run."""

    tools: tuple[Tool, ...]
    names: WireNames
    hosted: tuple[str, ...]


def read_tools(fields: Fields) -> OfferedTool:
    """
    The tools of a request; hosted ones are left out.

    Raises:
        BadRequest: naming the field.
    """
    tools: list[Tool] = []
    names: WireNames = {}
    hosted: list[str] = []
    for item, namespace in _flat(fields):
        kind = item.text("type") or ""
        known = client_tool(item)
        if known is not None:
            tools.append(_function(known.name, known.description, known.parameters))
            names[known.name] = WireName(known.name, client_tool=known)
        elif kind in ("function", "custom"):
            tool, wire = _tool(item, namespace)
            tools.append(tool)
            names[tool.name] = wire
        else:
            hosted.append(kind[:40])
    return OfferedTool(tuple(tools), names, tuple(dict.fromkeys(hosted)))


def _flat(fields: Fields) -> Iterator[tuple[Fields, str | None]]:
    for item in fields.objects("tools"):
        if item.text("type") == "namespace":
            name = item.required_text("name")
            yield from ((inner, name) for inner in item.objects("tools"))
        else:
            yield item, None


def _tool(item: Fields, namespace: str | None) -> tuple[Tool, WireName]:
    name = item.required_text("name")
    is_custom = item.text("type") == "custom"
    given = None if is_custom else item.printable_object("parameters")
    parameters = given or (
        CUSTOM_SCHEMA if is_custom else {"type": "object", "properties": {}}
    )
    model_name = model_tool_name(name, namespace)
    tool = _function(model_name, item.text("description") or "", parameters)
    if not is_custom and item.boolean("strict", False):
        tool = replace(tool, strict_param="tools[].strict")
    return tool, WireName(name, namespace, is_custom)


def _function(name: str, description: str, parameters: dict[str, Any]) -> Tool:
    raw = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": raw})


def model_tool_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def read_tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """Which tools may or must be called."""
    value = fields.raw("tool_choice")
    if isinstance(value, dict):
        kind = value.get("type")
        name = kind if kind in CLIENT_TOOLS else value.get("name")
        if kind in ("function", "custom", *CLIENT_TOOLS) and isinstance(name, str):
            if name not in {tool.name for tool in tools}:
                raise BadRequest(
                    f"tool_choice names {name[:64]!r}, which is not among the tools",
                    param="tool_choice",
                )
            return ToolChoice("named", name)
        value = value.get("mode", "auto")  # allowed_tools; hosted tools: auto
    if value == "required":
        return ToolChoice("required")
    if value == "none":
        return ToolChoice("none")
    if value not in (None, "auto"):
        raise BadRequest(
            "tool_choice must be none, auto, required or name a function",
            param="tool_choice",
        )
    return ToolChoice("auto")


def is_choice_kept(fields: Fields) -> bool:
    """Whether `tool_choice` is done in full: not of hosted tools, or of a subset."""
    value = fields.raw("tool_choice")
    kinds = ("function", "custom", *CLIENT_TOOLS)
    return not isinstance(value, dict) or value.get("type") in kinds


def call_item(call: ToolCall, names: WireNames, item_id: str) -> dict[str, Any]:
    """A call as an output item, complete."""
    wire = names.get(call.name, WireName(call.name))
    item: dict[str, Any] = {"id": item_id, "status": "completed", "call_id": call.id}
    client_item = wire.client_tool.item(call) if wire.client_tool else None
    if client_item is not None:
        return {**item, **client_item}
    if wire.is_custom:
        text = custom_input(call.arguments)
        return {**item, "type": "custom_tool_call", "name": wire.name, "input": text}
    item |= {"type": "function_call", "name": wire.name, "arguments": call.arguments}
    return {**item, "namespace": wire.namespace} if wire.namespace else item
