"""Tools that a client loads when they are needed."""

import json
from typing import Any

import httpx
import pytest

from sidecar.core.requests import ChatRequest
from sidecar.dialects.anthropic_messages.request import parse_messages
from sidecar.pipeline.template.chat_template import offered_tools
from testkit.servers import running_sidecar

Json = dict[str, Any]
DEFER = "tools[].defer_loading"


def tool(name: str, *, is_deferred: bool = False) -> Json:
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    deferred = {"defer_loading": True} if is_deferred else {}
    about = f"What {name} does. " * 8
    return {"name": name, "description": about, "input_schema": schema, **deferred}


def loaded(*names: str) -> list[Json]:
    """A search for tools, and what it found."""
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    call = {"type": "tool_use", "id": "toolu_1", "name": "Search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": found}
    return [
        {"role": "user", "content": "look " * 300},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


def parse(messages: list[Json], *tools: Json) -> ChatRequest:
    body = {"messages": messages, "max_tokens": 4, "tools": list(tools)}
    return parse_messages(body, "r", {})


def offered(request: ChatRequest) -> list[str]:
    return [tool.name for tool in offered_tools(request)]


def test_a_tool_is_defined_where_a_reference_names_it() -> None:
    """It is callable, and the tools before all messages are what they were."""
    request = parse(loaded("Cron"), tool("Bash"), tool("Cron", is_deferred=True))
    assert [tool.name for tool in request.tools] == ["Bash", "Cron"]
    assert offered(request) == ["Bash"]
    defined = json.loads(request.messages[-1].text)["function"]
    assert defined["name"] == "Cron"
    assert defined["parameters"]["properties"] == {"at": {"type": "string"}}
    assert DEFER not in request.ignored


def test_a_tool_that_nothing_names_is_offered_as_any_other() -> None:
    """The search may be one that Anthropic runs; the client is told."""
    request = parse(loaded("Cron"), tool("Bash"), tool("List", is_deferred=True))
    assert offered(request) == ["Bash", "List"]
    assert json.loads(request.messages[-1].text) == {"tool_name": "Cron"}
    assert DEFER in request.ignored
    both = [tool("Cron", is_deferred=True), tool("List", is_deferred=True)]
    request = parse(loaded("Cron"), *both)
    assert offered(request) == ["List"]
    assert DEFER in request.ignored


def test_a_reference_to_a_tool_that_is_not_deferred_is_read_as_it_is() -> None:
    """It stands among the others already."""
    request = parse(loaded("Bash"), tool("Bash"))
    assert offered(request) == ["Bash"]
    assert json.loads(request.messages[-1].text) == {"tool_name": "Bash"}


@pytest.mark.parametrize(
    "content",
    [
        None, "text", [], [5], ["text"], [{"type": "tool_reference"}],
        [{"type": "tool_reference", "tool_name": 5}],
        [{"type": "tool_reference", "tool_name": ["Cron"]}],
    ],
)  # fmt: skip
def test_odd_results_are_read_as_before(content: Any) -> None:
    """Or refused where they were: nothing here looks at more than references."""
    talk = loaded()
    talk[-1]["content"][0]["content"] = content

    def outcome(*tools: Json) -> object:
        try:
            return parse(talk, tool("Bash"), *tools).messages
        except Exception as error:  # noqa: BLE001 - whichever it is
            return type(error), str(error)

    assert outcome() == outcome(tool("Cron", is_deferred=True))


def test_loading_a_tool_appends_to_the_prompt() -> None:
    """A client that loads one behind a long talk waits for its definition alone."""
    with running_sidecar() as app:

        def ask(messages: list[Json], *tools: Json) -> Json:
            body = {"model": "local", "max_tokens": 4, "messages": messages}
            whole = {**body, "tools": list(tools), "session_id": "s"}
            answer = httpx.post(f"{app.url}/v1/messages", json=whole, timeout=120)
            assert answer.status_code == 200, answer.text
            usage: Json = answer.json()["usage"]
            return usage

        talk = loaded("Cron")
        first = ask(talk[:1], tool("Bash"), tool("Search"))
        tools = [tool("Bash"), tool("Cron", is_deferred=True), tool("Search")]
        then = ask(talk, *tools)
    whole = first["input_tokens"] + first["cache_read_input_tokens"]
    assert then["cache_read_input_tokens"] > 0.95 * whole
