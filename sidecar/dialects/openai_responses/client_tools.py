"""
OpenAI's own tools that the client runs: functions to the model, items on the wire.

A call is an item `<tool>_call` that holds what to do, its result `<tool>_call_output`.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.errors import UnsupportedContent
from sidecar.core.json_bytes import load_json
from sidecar.core.requests import ToolCall
from sidecar.dialects.fields import Fields

Json = dict[str, Any]
_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer"}
_WORDS: Json = {"type": "array", "items": _TEXT}
_TYPES: dict[str, type] = {"string": str, "integer": int, "array": list}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """
    A tool that clients name by its type alone.

    Args:
        parameters: its schema, of strings, integers and lists of strings.
        place: the field of its call's item that holds the arguments.
        fixed: what stands there besides, whatever was called for.
    """

    name: str
    description: str
    parameters: Json
    place: str
    fixed: Json = field(default_factory=dict)

    def item(self, call: ToolCall) -> Json | None:
        """A call's item, but for its ids; None for arguments that do not fit."""
        try:
            given = load_json(call.arguments)
        except ValueError:
            return None
        if not isinstance(given, dict) or not self._fits(given):
            return None
        arguments = {name: given[name] for name in self._properties if name in given}
        return {"type": f"{self.name}_call", self.place: {**self.fixed, **arguments}}

    def call(self, item: Fields) -> ToolCall:
        """An item as the call that it was."""
        place = Fields(item.raw(self.place), item.path(self.place))
        place.require_printable()
        given = {
            name: value
            for name, value in place.whole.items()
            if name in self._properties and value not in (None, "")
        }
        call_id = item.text("call_id") or item.text("id") or ""
        return ToolCall(call_id, self.name, json.dumps(given, ensure_ascii=False))

    @property
    def _properties(self) -> Json:
        properties: Json = self.parameters["properties"]
        return properties

    def _fits(self, given: Json) -> bool:
        is_whole = all(name in given for name in self.parameters["required"])
        return is_whole and all(
            _is_of(given[name], schema)
            for name, schema in self._properties.items()
            if name in given
        )


def _is_of(value: Any, schema: Json) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list) and not all(isinstance(word, str) for word in value):
        return False
    return isinstance(value, _TYPES[schema["type"]]) and not isinstance(value, bool)


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


CLIENT_TOOLS = {
    tool.name: tool
    for tool in (
        ClientTool(
            "local_shell",
            "Run a program on the user's machine.",
            _object(
                ("command",),
                command={**_WORDS, "description": 'as in ["bash", "-lc", "ls"]'},
                working_directory=_TEXT,
                timeout_ms=_NUMBER,
            ),
            "action",
            {"type": "exec", "env": {}},
        ),
        ClientTool(
            "shell",
            "Run shell commands on the user's machine.",
            _object(
                ("commands",),
                commands={**_WORDS, "description": "each is run by a shell of its own"},
                timeout_ms=_NUMBER,
                max_output_length={**_NUMBER, "description": "in characters"},
            ),
            "action",
        ),
        ClientTool(
            "apply_patch",
            "Create, change or delete one file. A diff has no line numbers: lines that "
            "begin with a space are context, with - go, with + come; before a place "
            "that is elsewhere stands a line @@, which may name the function it is in. "
            "Of a new file all lines begin with +.",
            _object(
                ("type", "path"),
                type={**_TEXT, "enum": ["create_file", "update_file", "delete_file"]},
                path=_TEXT,
                diff={**_TEXT, "description": "not for delete_file"},
            ),
            "operation",
            {"diff": ""},
        ),
    )
}
_UNSERVED = ("computer_use_preview", "computer", "computer_use")


def client_tool(item: Fields) -> ClientTool | None:
    """
    The tool that an offer names by its type, if the client runs it.

    Raises:
        UnsupportedContent: the client runs it, and its calls cannot be written here.
    """
    kind = item.text("type") or ""
    if kind in _UNSERVED:
        raise UnsupportedContent(
            f"{item.path('type')} is {kind!r}, which is not served: offer a function",
            param=item.path("type"),
        )
    place = item.object("environment") or {}
    is_elsewhere = place.get("type") not in (None, "local")
    return None if is_elsewhere else CLIENT_TOOLS.get(kind)
