"""Responses items of tools that are no functions: none of what they say is lost."""

import json
from typing import Any

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.events import ChoiceFinished, Event, Finished, Usage
from sidecar.core.requests import ChatRequest, Image, Message, ToolCall
from sidecar.dialects.openai_responses.request import (
    Delivery,
    input_items,
    parse_responses,
)
from sidecar.dialects.openai_responses.stream import whole_response
from testkit.call_texts import whole_call

Json = dict[str, Any]
CLIENT_TOOLS = [{"type": name} for name in ("local_shell", "shell", "apply_patch")]


def parse(*items: Json, **body: Any) -> tuple[ChatRequest, Delivery]:
    """A request with these items after a question."""
    asked = {"role": "user", "content": "go"}
    whole = {"model": "m", "input": [asked, *items], **body}
    return parse_responses(whole, input_items(whole), "r", {})


def read(*items: Json) -> tuple[Message, ...]:
    """What items come to."""
    return parse(*items)[0].messages[1:]


def told(*calls: ToolCall, **body: Any) -> list[Json]:
    """The output items of calls that the model made."""
    events: list[Event] = [
        *(e for n, call in enumerate(calls) for e in whole_call(0, n, call)),
        ChoiceFinished(0, "tool_calls"), Finished(Usage(1, 1, 0, 0)),
    ]  # fmt: skip
    how = parse(tools=CLIENT_TOOLS, **body)[1]
    output: list[Json] = whole_response(events, how, lambda response: None)["output"]
    return output


ROUND_TRIPS: list[tuple[str, Json, Json, Json, str]] = [
    ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5},
     {"action": {"type": "exec", "env": {}, "command": ["ls", "-l"], "timeout_ms": 5}},
     {"output": "a.txt"}, "a.txt"),
    ("shell", {"commands": ["ls", "cat x"]}, {"action": {"commands": ["ls", "cat x"]}},
     {"output": [
         {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}},
         {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}]},
     "a\nb\n[exit code 1]\n[timed out]"),
    ("apply_patch", {"type": "update_file", "path": "a", "diff": "-a\n+b"},
     {"operation": {"diff": "-a\n+b", "type": "update_file", "path": "a"}},
     {"status": "failed", "output": "no such line"}, "[failed]\nno such line"),
    ("apply_patch", {"type": "delete_file", "path": "a"},
     {"operation": {"diff": "", "type": "delete_file", "path": "a"}},
     {"status": "completed"}, "[completed]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "place", "answer", "text"), ROUND_TRIPS)
def test_a_call_that_the_client_runs_goes_there_and_back(
    name: str, given: Json, place: Json, answer: Json, text: str
) -> None:
    """The model's call as the client's item; echoed, the same call again."""
    item = told(ToolCall("c1", name, json.dumps(given)))[0]
    assert item.items() >= {"type": f"{name}_call", "call_id": "c1", **place}.items()
    assert item["status"] == "completed"
    output = {"type": f"{name}_call_output", "call_id": "c1", **answer}
    call, result = read(item, output)
    assert json.loads(call.tool_calls[0].arguments) == given
    assert (call.tool_calls[0].id, call.tool_calls[0].name) == ("c1", name)
    assert (result.text, result.tool_call_id) == (text, "c1")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", "{}"), ("shell", "ls"), ("shell", '{"commands": "ls"}'),
        ("shell", '{"commands": [1]}'), ("local_shell", "[]"),
        ("apply_patch", '{"type": "move", "path": "a"}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": true}'),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_told_as_they_are(
    name: str, arguments: str
) -> None:
    """Nothing is run that the model did not say."""
    item = told(ToolCall("c1", name, arguments))[0]
    assert (item["type"], item["name"]) == ("function_call", name)
    assert item["arguments"] == arguments


def test_what_the_model_is_offered() -> None:
    """And that it may be made to call one of them; a container's shell is not ours."""
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    request, _ = parse(
        tools=[*CLIENT_TOOLS, shell], tool_choice={"type": "apply_patch"}
    )
    assert [t.name for t in request.tools] == ["local_shell", "shell", "apply_patch"]
    assert request.tools[1].parameters["required"] == ["commands"]
    assert (request.tool_choice.mode, request.tool_choice.name) == (
        "named", "apply_patch",
    )  # fmt: skip
    assert request.ignored == ("tools[shell]",)


@pytest.mark.parametrize(
    ("item", "name", "arguments", "result"),
    [
        ({"type": "web_search_call", "action": {"type": "search", "query": "q"}},
         "web_search", {"type": "search", "query": "q"}, "status: completed"),
        ({"type": "file_search_call", "queries": ["q"], "results": [{"text": "é"}]},
         "file_search", {"queries": ["q"]}, '[{"text": "é"}]'),
        ({"type": "code_interpreter_call", "code": "1+1", "outputs": [
            {"type": "logs", "logs": "2"}]},
         "code_interpreter", {"code": "1+1"}, '[{"type": "logs", "logs": "2"}]'),
        ({"type": "mcp_call", "name": "ask", "server_label": "docs",
          "arguments": '{"q": 1}', "output": "found"}, "docs__ask", {"q": 1}, "found"),
        ({"type": "mcp_call", "name": "ask", "server_label": "docs",
          "arguments": "{}", "error": "down"}, "docs__ask", {}, "down"),
    ],
)  # fmt: skip
def test_what_openais_servers_ran_is_read_as_call_and_result(
    item: Json, name: str, arguments: Json, result: str
) -> None:
    """In the past of a conversation that goes on here."""
    call, answer = read({"id": "x1", "status": "completed", **item})
    assert call.tool_calls[0].name == name
    assert json.loads(call.tool_calls[0].arguments) == arguments
    assert (answer.role, answer.text, answer.tool_call_id) == ("tool", result, "x1")


def test_pictures_in_results_are_pictures() -> None:
    """A screenshot, and a picture that was made."""
    call, shot, made, picture = read(
        {"type": "computer_call", "call_id": "c", "action": {"type": "wait"}},
        {"type": "computer_call_output", "call_id": "c", "output": {
            "type": "computer_screenshot", "image_url": "data:image/png;base64,AA"}},
        {"type": "image_generation_call", "id": "i", "result": "BB"},
    )  # fmt: skip
    assert json.loads(call.tool_calls[0].arguments) == {"type": "wait"}
    assert isinstance(shot.parts[0], Image)
    assert shot.parts[0].source.endswith("AA")
    assert made.tool_calls[0].name == "image_generation"
    assert picture.images[0].source == "data:image/png;base64,BB"


def test_items_that_say_nothing_to_a_model_are_named() -> None:
    """Each type once."""
    listed = {"type": "mcp_list_tools", "tools": []}
    request, _ = parse(listed, listed, {"type": "tomorrow"})
    assert request.ignored == ("input[mcp_list_tools]", "input[tomorrow]")


@pytest.mark.parametrize(
    "choice", [{"type": "web_search"}, {"type": "allowed_tools", "mode": "auto"}]
)
def test_a_choice_that_cannot_be_kept_is_named(choice: Json) -> None:
    assert parse(tools=CLIENT_TOOLS, tool_choice=choice)[0].ignored == ("tool_choice",)


def test_what_is_nested_without_end_is_refused() -> None:
    value: Any = 1
    for _ in range(300):
        value = [value]
    for item in ({"type": "file_search_call", "results": value},
                 {"type": "shell_call", "action": {"commands": value}}):  # fmt: skip
        with pytest.raises(BadRequest, match="levels deep"):
            parse(item)
