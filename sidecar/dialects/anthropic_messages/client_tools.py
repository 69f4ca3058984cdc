"""
Anthropic's own tools that the client runs, as functions that any model can call.

A client names them by their type alone: their schemas are published, not sent.
"""

import re
from typing import Any

from sidecar.core.errors import UnsupportedContent
from sidecar.dialects.fields import Fields

_TYPE = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")
_TOOLSETS = re.compile(r"(computer|browser)_toolset_\d{8}")
_INSERT_TEXT_SINCE = "20250728"
_UNDO_UNTIL = "20250124"
Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer"}
_NUMBERS: Json = {"type": "array", "items": _NUMBER}
_EDITS: dict[str, Json] = {
    "path": _TEXT,
    "view_range": {**_NUMBERS, "description": "view: first and last line; -1: the end"},
    "file_text": {**_TEXT, "description": "create: what the file is to hold"},
    "old_str": {**_TEXT, "description": "str_replace: what to replace, once in it"},
    "new_str": {**_TEXT, "description": "str_replace: what to put in its place"},
    "insert_line": {**_NUMBER, "description": "insert: behind which line; 0: first"},
}
_INSERTED: Json = {**_TEXT, "description": "insert: the text to insert"}


def client_tool(item: Fields) -> tuple[str, Json] | None:
    """
    What a tool does and its schema, if it is one that the client runs.

    Raises:
        UnsupportedContent: the client runs it, and its schema is not known here.
    """
    kind = item.text("type") or ""
    if _TOOLSETS.fullmatch(kind):
        raise UnsupportedContent(
            f"{item.path('type')} is {kind!r}, which is not served: offer a function",
            param=item.path("type"),
        )
    found = _TYPE.fullmatch(kind)
    if found is None:
        return None
    family, date = found.groups()
    if family == "bash":
        return _BASH
    if family == "memory":
        return _MEMORY
    return _editor(date) if family == "text_editor" else _computer(item, date)


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _one_of(*words: str) -> Json:
    return {"type": "string", "enum": list(words)}


_BASH = (
    "Run a command in a bash session that lasts. Its state is kept between calls.",
    _object(
        (),
        command={**_TEXT, "description": "the command; needed unless restart is true"},
        restart={"type": "boolean", "description": "true: begin a new session"},
    ),
)
_MEMORY = (
    "Keep notes in files below /memories, which last longer than this conversation. "
    "View the folder before you begin.",
    _object(
        ("command",),
        command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
        **_EDITS,
        insert_text=_INSERTED,
        old_path={**_TEXT, "description": "rename: the path as it is"},
        new_path={**_TEXT, "description": "rename: the path as it shall be"},
    ),
)


def _editor(date: str) -> tuple[str, Json]:
    commands = ["view", "create", "str_replace", "insert"]
    edits = _EDITS
    if date <= _UNDO_UNTIL:
        commands.append("undo_edit")
    if date >= _INSERT_TEXT_SINCE:
        edits = {**_EDITS, "insert_text": _INSERTED}
    else:  # there the new text of both commands has one name
        both = "str_replace: what to put in its place; insert: the text to insert"
        edits = {**_EDITS, "new_str": {**_TEXT, "description": both}}
    return (
        "View, create and edit text files; view lists a folder.",
        _object(("command", "path"), command=_one_of(*commands), **edits),
    )


_ACTIONS = (
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "screenshot",
    "cursor_position",
)
_LATER_ACTIONS = (
    "left_mouse_down",
    "left_mouse_up",
    "scroll",
    "hold_key",
    "wait",
    "triple_click",
)
_FIRST_COMPUTER = "20241022"


def _computer(item: Fields, date: str) -> tuple[str, Json]:
    actions: tuple[str, ...] = _ACTIONS
    more: dict[str, Json] = {}
    if date > _FIRST_COMPUTER:
        actions += _LATER_ACTIONS
        more = {
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": {**_NUMBER, "description": "scroll: number of clicks"},
            "duration": {"type": "number", "description": "hold_key, wait: seconds"},
        }
    if item.boolean("enable_zoom", False):
        actions += ("zoom",)
        corners = "zoom: x and y of the upper left and of the lower right corner"
        more["region"] = {**_NUMBERS, "description": corners}
    width = item.integer("display_width_px", 1, 1 << 16)
    height = item.integer("display_height_px", 1, 1 << 16)
    return (
        "Use the mouse and the keyboard of a computer and take screenshots of it. Its "
        f"screen has {width} x {height} pixels.",
        _object(
            ("action",),
            action=_one_of(*actions),
            coordinate={
                **_NUMBERS,
                "description": "x and y, from the upper left",
            },
            start_coordinate={**_NUMBERS, "description": "left_click_drag: from where"},
            text={**_TEXT, "description": "type: the text; key, hold_key: the keys"},
            **more,
        ),
    )
