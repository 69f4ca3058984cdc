"""The conversation and the tools of a chat request."""

from typing import Any

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, ToolCall, ToolChoice
from sidecar.dialects.fields import Fields
from sidecar.dialects.openai_chat.request import read_messages
from sidecar.dialects.openai_chat.tools import (
    call_dict,
    custom_names,
    read_tool_choice,
    read_tools,
)


def message(**fields: Any) -> Message:
    return read_messages(Fields({"messages": [fields]}))[0]


def read_all(body: dict[str, Any]) -> None:
    fields = Fields(body)
    read_tool_choice(fields, read_tools(fields))
    read_messages(fields)


def fault(body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_all(body)
    return caught.value


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(role: str, expected: str) -> None:
    """developer is system, function is tool."""
    assert message(role=role, content="x").role == expected


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("text", ("text",)),
        (None, ()),
        ([], ()),
        (["plain", {"text": "no type"}], ("plain", "no type")),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "ab"),
        ([{"type": "output_text", "text": "c"}], ("c",)),
        ([{"type": "refusal", "refusal": "no"}], ("no",)),
        ([{"type": "redacted_thinking", "data": "x"}, "y"], ("y",)),
        ([{"type": "text", "text": "a", "cache_control": {"type": "e"}}], ("a",)),
    ],
)
def test_content_is_its_text_parts(content: Any, parts: Any) -> None:
    """A string is one part; parts of the known text types keep their order."""
    assert message(role="user", content=content).parts == tuple(parts)


def test_parts_are_joined_by_a_newline_unless_one_stands_there() -> None:
    """How a client cut its text is not content."""
    parts = ["a", "b\n", "c", "\nd", ""]
    assert message(role="user", content=parts).text == "a\nb\nc\nd"


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "r"}, "r"),
        ({"reasoning": "r"}, "r"),
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": ""}, ""),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "a"}]}, "a"),
        (
            {"thinking_blocks": [{"thinking": "a"}, {"type": "redacted_thinking"}]},
            "a",
        ),
        ({"content": [{"type": "thinking", "thinking": "a"}, "x"]}, "a"),
        ({"content": [{"type": "reasoning", "text": "a"}, "x"]}, "a"),
        ({"reasoning": {"effort": "low"}}, None),
        ({"content": "x"}, None),
    ],
)
def test_carriers_of_echoed_reasoning(
    fields: dict[str, Any], reasoning: str | None
) -> None:
    """Every way in which clients send thinking back is understood."""
    assert message(**{"role": "assistant", **fields}).reasoning == reasoning


def test_only_the_assistant_reasons_and_calls() -> None:
    """The same fields on a user message mean nothing."""
    calls = [function("f", arguments="{}")]
    got = message(role="user", content="x", reasoning_content="r", tool_calls=calls)
    assert (got.reasoning, got.tool_calls) == (None, ())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": "é"}, '{"a": "é"}'),
        (None, ""),
        ("not json", "not json"),
        ([1], "[1]"),
    ],
)
def test_calls_keep_their_arguments_as_text(arguments: Any, expected: str) -> None:
    """Arguments that came as an object become JSON text."""
    call = {"id": "c1", **function("f", arguments=arguments)}
    got = message(role="assistant", tool_calls=[call])
    assert got.tool_calls == (ToolCall("c1", "f", expected),)


def test_a_tool_message_keeps_its_call_id() -> None:
    """tool_call_id belongs to tool messages only."""
    assert message(role="tool", content="x", tool_call_id="c").tool_call_id == "c"
    assert message(role="user", content="x", tool_call_id="c").tool_call_id is None


def test_a_clients_objects_are_not_changed() -> None:
    """Reading a request leaves it as it was."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    before = repr(body)
    read_messages(Fields(body))
    assert repr(body) == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": 3}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"messages": [{"role": "assistant", "thinking_blocks": [1]}]},
            "messages[0].thinking_blocks[0]",
        ),
        (
            {"messages": [{"role": "tool", "tool_call_id": 3}]},
            "messages[0].tool_call_id",
        ),
        ({"tools": {}, "messages": HELLO}, "tools"),
        ({"tools": [3], "messages": HELLO}, "tools[0]"),
        ({"tools": [{"type": "function"}], "messages": HELLO}, "tools[0].function"),
        (
            {"tools": [{"function": {"name": ""}}], "messages": HELLO},
            "tools[0].function.name",
        ),
        (
            {"tools": [function("f", parameters=[])], "messages": HELLO},
            "tools[0].function.parameters",
        ),
        ({"functions": [{}], "messages": HELLO}, "functions[0].name"),
        ({"tool_choice": 3, "messages": HELLO}, "tool_choice"),
        ({"tool_choice": "maybe", "messages": HELLO}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
    ],
)
def test_a_fault_is_named_by_its_path(body: dict[str, Any], param: str) -> None:
    """param leads to the field, and the message begins with it."""
    error = fault(body)
    assert error.param == param
    assert error.message.startswith(param)


def test_tools_in_both_spellings() -> None:
    """`tools` and the older `functions`; unknown kinds of tool are left out."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = {
        "tools": [function("f", parameters=schema), {"type": "web_search"}],
        "functions": [{"name": "g", "description": "d"}],
    }
    first, second = read_tools(Fields(body))
    assert (first.name, first.parameters) == ("f", schema)
    assert second.raw == {
        "type": "function",
        "function": {
            "name": "g",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ("any", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", "f")),
        ({"name": "f"}, ToolChoice("named", "f")),
    ],
)
@pytest.mark.parametrize("field", ["tool_choice", "function_call"])
def test_tool_choice(field: str, choice: Any, expected: ToolChoice) -> None:
    """All forms, under the new name and the old."""
    fields = Fields({"tools": [function("f")], field: choice})
    assert read_tool_choice(fields, read_tools(fields)) == expected


def test_required_without_tools_is_read_as_that() -> None:
    """Nothing can be required of no tools: the field is named (tests/server)."""
    assert read_tool_choice(Fields({"tool_choice": "required"}), ()).mode == "required"


def test_a_legacy_call_and_its_result_are_a_call_and_its_result() -> None:
    """`function_call` of an assistant, and a message of the role `function`."""
    called = message(role="assistant", function_call={"name": "f", "arguments": "{}"})
    assert called.tool_calls == (ToolCall("", "f", "{}"),)
    assert message(role="function", name="f", content="7").role == "tool"
    error = fault({"messages": [{"role": "assistant", "function_call": {"name": 3}}]})
    assert error.param == "messages[0].function_call.name"


def test_a_refusal_is_what_the_assistant_said() -> None:
    """OpenAI's clients echo it beside a content of null."""
    assert message(role="assistant", content=None, refusal="No.").text == "No."


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    """Offered, called in the past, and chosen."""
    custom = {"type": "custom", "custom": {"name": "c", "description": "d"}}
    fields = Fields({"tools": [custom], "tool_choice": custom})
    (tool,) = tools = read_tools(fields)
    assert (tool.name, tool.is_custom) == ("c", True)
    assert tool.parameters["required"] == ["input"]
    assert read_tool_choice(fields, tools) == ToolChoice("named", "c")
    past = {"id": "x", "type": "custom", "custom": {"name": "c", "input": 'say "hi"'}}
    (call,) = message(role="assistant", tool_calls=[past]).tool_calls
    assert call == ToolCall("x", "c", '{"input": "say \\"hi\\""}')
    assert call_dict(call, custom_names(tools)) == past
