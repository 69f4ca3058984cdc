"""Anthropic's own tools that the client runs: what the model is offered."""

from typing import Any

import pytest

from sidecar.core.requests import Tool
from sidecar.dialects.anthropic_messages.request import parse_messages


def offered(**tool: Any) -> Tool:
    """One tool as the model is given it."""
    messages = [{"role": "user", "content": "go"}]
    body = {"model": "m", "messages": messages, "tools": [tool]}
    request = parse_messages(body, "r", {})
    assert request.ignored == ()
    return request.tools[0]


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        ("bash_20241022", "bash", {"command", "restart"}),
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250124", "str_replace_editor", {"command", "path", "new_str"}),
        ("text_editor_20250728", "str_replace_based_edit_tool",
         {"command", "path", "old_str", "new_str", "insert_line", "insert_text"}),
        ("memory_20250818", "memory", {"command", "path", "old_path", "new_path"}),
        ("computer_20250124", "computer", {"action", "coordinate", "scroll_amount"}),
    ],
)  # fmt: skip
def test_a_tool_of_a_type_has_the_published_schema(
    kind: str, name: str, fields: set[str]
) -> None:
    """Under the name by which the client knows its calls."""
    tool = offered(type=kind, name=name)
    assert tool.name == name
    assert fields <= set(tool.parameters["properties"])
    assert set(tool.parameters["required"]) <= fields
    assert tool.raw["function"]["description"]


def test_what_a_version_cannot_do_is_not_offered() -> None:
    """Undoing went, and zooming is asked for."""

    def words(field: str, **tool: Any) -> Any:
        return offered(**tool).parameters["properties"][field]["enum"]

    old = words("command", type="text_editor_20250124", name="str_replace_editor")
    new = words("command", type="text_editor_20250728", name="e")
    assert ("undo_edit" in old, "undo_edit" in new) == (True, False)
    screen = {"type": "computer_20251124", "name": "c", "display_width_px": 800}
    assert "zoom" not in words("action", **screen)
    assert "zoom" in words("action", enable_zoom=True, **screen)
    assert "800 x" in offered(**screen).raw["function"]["description"]


def test_a_tool_without_a_type_or_a_schema_is_offered_all_the_same() -> None:
    assert offered(name="ping").parameters == {"type": "object", "properties": {}}
