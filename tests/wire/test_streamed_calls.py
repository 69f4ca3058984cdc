"""
A long call is seen while it is written, by real SDKs through the real proxy.

The model's text is decided here, in three formats of calls; all else is real.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.proxy import Proxy, running_proxy
from testkit.scripted import Prompt, scripted
from testkit.servers import running_sidecar

Json = dict[str, Any]
NAME = "local"
TEXT = "".join(f'line {n}: </tool_call> "quoted" \\ {{}}\n' for n in range(14))
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION = {"name": "write", "description": "Write.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = {
    "json": '{"name": "write", "arguments": ' + json.dumps({"text": TEXT}) + "}",
    "xml": f"<function=write>\n<parameter=text>\n{TEXT}\n</parameter>\n</function>",
    "glm": f"write<arg_key>text</arg_key><arg_value>{TEXT}</arg_value>",
}
SHORT = '<tool_call>{"name": "write", "arguments": {"text": "a"}}</tool_call>'
OTHER = SHORT.replace('"a"', '"b"')
BROKEN = '<tool_call>{"name": "write", "arguments": {"text": "abc", oops}}</tool_call>'


def say(prompt: Prompt) -> str:
    """What the last word of the prompt asks for."""
    wanted = prompt.turns[-1].text.split()[-1]
    if wanted == "two":
        return f"{SHORT}\n{OTHER}"
    if wanted == "broken":
        return BROKEN
    return f"Well.\n<tool_call>\n{CALLS[wanted]}\n</tool_call>"


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    settings = {"CACHE_SELFTEST": "off", "DEFAULT_THINKING": "false"}
    with running_sidecar(settings, scripted(say)) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(app: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running_proxy(app.url, tmp_path_factory.mktemp("proxy")) as running:
        yield running


def asked(wanted: str) -> list[Any]:
    return [{"role": "user", "content": f"Do {wanted}"}]


@pytest.mark.parametrize("wanted", CALLS)
def test_openai_sees_a_call_while_it_is_written(proxy: Proxy, wanted: str) -> None:
    """In pieces from the first on; together the same as the whole answer's."""
    whole = proxy.openai.chat.completions.create(
        model=NAME, messages=asked(wanted), tools=TOOLS, max_tokens=9000
    )
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"text": TEXT}
    pieces = [
        part.function.arguments or ""
        for chunk in proxy.openai.chat.completions.create(
            model=NAME,
            messages=asked(wanted),
            tools=TOOLS,
            max_tokens=9000,
            stream=True,
        )
        for choice in chunk.choices
        for part in choice.delta.tool_calls or ()
    ]
    assert "".join(pieces) == call.function.arguments
    assert max(map(len, pieces)) < len(TEXT) / 8


@pytest.mark.parametrize("wanted", CALLS)
def test_anthropic_parses_each_piece(proxy: Proxy, wanted: str) -> None:
    """Its SDK reads all that has come so far as JSON at each delta."""
    snapshots = []
    with proxy.anthropic.messages.stream(
        model=NAME,
        messages=asked(wanted),
        max_tokens=9000,
        tools=[{"name": "write", "input_schema": SCHEMA}],
    ) as stream:
        for event in stream:
            if event.type == "input_json":
                snapshots.append(event.snapshot)
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[-1].input == {"text": TEXT}
    assert len(snapshots) > 50
    sizes = [len(snapshot.get("text", "")) for snapshot in snapshots]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("wanted", CALLS)
def test_responses_have_the_deltas(proxy: Proxy, wanted: str) -> None:
    tools = [{"type": "function", **FUNCTION}]
    deltas, done = [], []
    for event in proxy.openai.responses.create(
        model=NAME, input=f"Do {wanted}", tools=tools, stream=True,
        max_output_tokens=9000,
    ):  # fmt: skip
        if event.type == "response.function_call_arguments.delta":
            deltas.append(event.delta)
        if event.type == "response.output_item.done":
            done.append(event.item)
    assert json.loads("".join(deltas)) == {"text": TEXT}
    assert done[-1].arguments == "".join(deltas)
    assert len(deltas) > 50


def test_one_call_is_made_where_one_is_wanted(app: App) -> None:
    """And two where nothing is said; on each route."""
    for single in (None, False):
        body = {"messages": asked("two"), "tools": TOOLS, "max_tokens": 200}
        more = {} if single is None else {"parallel_tool_calls": False}
        chat = httpx.post(f"{app.url}/v1/chat/completions", json={**body, **more})
        calls = chat.json()["choices"][0]["message"]["tool_calls"]
        assert len(calls) == (2 if single is None else 1)
        choice = {} if single is None else {"disable_parallel_tool_use": True}
        tools = [{"name": "write", "input_schema": SCHEMA}]
        message = httpx.post(
            f"{app.url}/v1/messages",
            json={**body, "tools": tools, "tool_choice": {"type": "auto", **choice}},
        ).json()
        used = [block for block in message["content"] if block["type"] == "tool_use"]
        assert len(used) == (2 if single is None else 1)


def _events(app: App, route: str, body: Json) -> list[Json]:
    with httpx.stream(
        "POST", f"{app.url}{route}", json={**body, "stream": True}, timeout=60
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_call_that_breaks_is_run_by_nobody(app: App) -> None:
    """On chat its client has bad JSON to report; on Messages the stream fails."""
    body = {"messages": asked("broken"), "tools": TOOLS, "max_tokens": 200}
    chunks = _events(app, "/v1/chat/completions", body)
    text = "".join(
        call["function"].get("arguments", "")
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    )
    assert text.startswith('{"text": "abc", ')
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    tools = [{"name": "write", "input_schema": SCHEMA}]
    events = _events(app, "/v1/messages", {**body, "tools": tools})
    assert events[-1]["type"] == "error"
    assert "write" in events[-1]["error"]["message"]
    whole = httpx.post(f"{app.url}/v1/messages", json={**body, "tools": tools}).json()
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert whole["stop_reason"] == "end_turn"
    chat = httpx.post(f"{app.url}/v1/chat/completions", json=body).json()["choices"][0]
    assert (chat["finish_reason"], "tool_calls" in chat["message"]) == ("stop", False)


def test_a_call_that_is_cut_never_ends(app: App) -> None:
    """Nor is it among a whole answer's calls; the reason is the length."""
    body = {"messages": asked("json"), "tools": TOOLS, "max_tokens": 100}
    chunks = _events(app, "/v1/chat/completions", body)
    assert any(
        c["choices"] and c["choices"][0]["delta"].get("tool_calls") for c in chunks
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    whole = httpx.post(f"{app.url}/v1/chat/completions", json=body).json()["choices"][0]
    assert (whole["finish_reason"], "tool_calls" in whole["message"]) == (
        "length",
        False,
    )
    tools = [{"name": "write", "input_schema": SCHEMA}]
    events = _events(app, "/v1/messages", {**body, "tools": tools})
    assert [event["type"] for event in events[-3:]] == [
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
