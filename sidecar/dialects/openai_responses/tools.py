"""The tools of a Responses request, and how their calls are named on the wire."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Tool, ToolCall, ToolChoice
from sidecar.dialects.custom_tools import CUSTOM_SCHEMA, custom_input
from sidecar.dialects.fields import Fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WireName:
    """A tool as the client knows it; `is_custom`: its calls carry bare text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


WireNames = dict[str, WireName]  # by the name that the model is given


def read_tools(fields: Fields) -> tuple[tuple[Tool, ...], WireNames]:
    """The offered functions; tools that OpenAI's servers run are left out."""
    tools: list[Tool] = []
    names: WireNames = {}
    for item, namespace in _flat(fields):
        kind = item.text("type")
        if kind not in ("function", "custom"):
            logger.info("ignored a tool type=%r", (kind or "")[:40])
            continue
        tool, wire = _tool(item, namespace)
        tools.append(tool)
        names[tool.name] = wire
    return tuple(tools), names


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
    raw = {
        "name": model_name,
        "description": item.text("description") or "",
        "parameters": parameters,
    }
    tool = Tool(model_name, parameters, {"type": "function", "function": raw})
    return tool, WireName(name, namespace, is_custom)


def model_tool_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def read_tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """Which tools may or must be called."""
    value = fields.raw("tool_choice")
    if isinstance(value, dict):
        name = value.get("name")
        if value.get("type") in ("function", "custom") and isinstance(name, str):
            if name not in {tool.name for tool in tools}:
                raise BadRequest(
                    f"tool_choice names {name[:64]!r}, which is not among the tools",
                    param="tool_choice",
                )
            return ToolChoice("named", name)
        value = value.get("mode", "auto")  # allowed_tools; hosted tools: auto
    if value == "required":
        return ToolChoice("required" if tools else "auto")
    if value == "none":
        return ToolChoice("none")
    if value not in (None, "auto"):
        raise BadRequest(
            "tool_choice must be none, auto, required or name a function",
            param="tool_choice",
        )
    return ToolChoice("auto")


def call_item(call: ToolCall, names: WireNames, item_id: str) -> dict[str, Any]:
    """A call as an output item, complete."""
    wire = names.get(call.name, WireName(call.name))
    item: dict[str, Any] = {"id": item_id, "status": "completed", "call_id": call.id}
    if wire.is_custom:
        text = custom_input(call.arguments)
        return {**item, "type": "custom_tool_call", "name": wire.name, "input": text}
    item |= {"type": "function_call", "name": wire.name, "arguments": call.arguments}
    return {**item, "namespace": wire.namespace} if wire.namespace else item
