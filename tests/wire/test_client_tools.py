"""
Tools that the client runs and names by their type alone, through both SDKs.

The model is offered them as functions, and its calls come back in the client's form.
"""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from sidecar.app import App
from testkit.proxy import Proxy
from testkit.scripted import Answer, Call, Switch, render

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

Clients = tuple[anthropic.Anthropic, openai.OpenAI]
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(params=["direct", "proxy"])
def clients(
    request: pytest.FixtureRequest, proxy: Proxy, scripted_sidecar: App, switch: Switch
) -> Iterator[Clients]:
    """Both SDKs, at the sidecar itself and at the proxy."""
    switch.prompts.clear()
    if request.param == "proxy":
        yield proxy.anthropic, proxy.openai
        return
    url, same = scripted_sidecar.url, {"api_key": "any", "max_retries": 0}
    with (
        anthropic.Anthropic(base_url=url, **same) as messages,
        openai.OpenAI(base_url=f"{url}/v1", **same) as responses,
    ):
        yield messages, responses


def answers(switch: Switch, *calls: Call) -> None:
    """The model makes these calls, one a turn, and then says `done`."""
    said = [*(Answer("", "", (call,)) for call in calls), Answer("", "done")]
    switch.script = lambda prompt: render(said[prompt.num_answers], prompt)


@STREAM
def test_anthropics_own_tools(clients: Clients, switch: Switch, stream: bool) -> None:
    """Bash and the editor: offered, called by their names, answered."""
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    view = {"command": "view", "path": "/a.txt"}
    answers(switch, Call("bash", {"command": "ls"}), Call(tools[1]["name"], view))
    turns: list[Any] = [{"role": "user", "content": "What is in a.txt?"}]
    made = []
    for result in ("a.txt", "alpha", None):
        body: Any = {"model": "local", "max_tokens": 300, "tools": tools}
        if stream:
            with clients[0].messages.stream(messages=turns, **body) as events:
                message = events.get_final_message()
        else:
            message = clients[0].messages.create(messages=turns, **body)
        if result is not None:
            use: Any = message.content[-1]
            made.append((use.type, use.name, use.input))
            block = {"type": "tool_result", "tool_use_id": use.id, "content": result}
            echo = {"role": "assistant", "content": message.content}
            turns += [echo, {"role": "user", "content": [block]}]
    names = [tool["name"] for tool in switch.prompts[0].tools]
    assert names == ["bash", "str_replace_based_edit_tool"]
    assert made == [("tool_use", "bash", {"command": "ls"}),
                    ("tool_use", "str_replace_based_edit_tool", view)]  # fmt: skip
    assert [turn.text for turn in switch.prompts[-1].turns if turn.role == "tool"] == [
        "a.txt",
        "alpha",
    ]


RUNS = (
    ("local_shell", {"command": ["ls"]}, {"output": "a.txt"}),
    ("shell", {"commands": ["cat a.txt"]}, {"output": [
        {"stdout": "alpha", "stderr": "",
         "outcome": {"type": "exit", "exit_code": 0}}]}),
    ("apply_patch", {"type": "update_file", "path": "a.txt", "diff": "-alpha\n+beta"},
     {"status": "completed", "output": "changed"}),
)  # fmt: skip


@STREAM
@pytest.mark.parametrize("by_id", [False, True], ids=["items", "previous"])
def test_openais_own_tools(
    clients: Clients, switch: Switch, stream: bool, by_id: bool
) -> None:
    """Each call is an item of its own type, and goes on where the model stopped."""
    answers(switch, *(Call(name, given) for name, given, _ in RUNS))
    body: Any = {"model": "local", "tools": [{"type": name} for name, _, _ in RUNS]}
    sent: list[Any] = [{"role": "user", "content": "Make it beta."}]
    for name, _, output in RUNS:
        answer = respond(clients[1], stream, input=sent, **body)
        call: Any = answer.output[-1]
        assert call.type == f"{name}_call"
        result = {"type": f"{name}_call_output", "call_id": call.call_id, **output}
        if by_id:
            body["previous_response_id"], sent = answer.id, [result]
        else:
            echo = [item.model_dump(exclude_none=True) for item in answer.output]
            sent = [*sent, *echo, result]
    last = respond(clients[1], stream, input=sent, **body)
    assert last.output_text == "done"
    assert (
        last.usage.input_tokens_details.cached_tokens >= answer.usage.total_tokens - 1
    )
    prompt = switch.prompts[-1]
    calls = [call for turn in prompt.turns for call in turn.calls]
    assert calls == [Call(name, given) for name, given, _ in RUNS]
    said = [turn.text for turn in prompt.turns if turn.role == "tool"]
    assert said == ["a.txt", "alpha\n[exit code 0]", "changed"]


def respond(client: openai.OpenAI, stream: bool, **body: Any) -> Any:
    """A response, whole or the last of its stream."""
    if not stream:
        return client.responses.create(**body)
    with client.responses.stream(**body) as events:
        return events.get_final_response()


@STREAM
@pytest.mark.parametrize("field", ["conversation", "prompt"])
def test_what_only_openai_keeps_is_refused(
    clients: Clients, switch: Switch, field: str, stream: bool
) -> None:
    """Answered 200, the model would have seen the last message alone."""
    named = {field: {"id": "conv_1"}}
    with pytest.raises(openai.BadRequestError, match=f"{field} is not served"):
        clients[1].responses.create(
            model="local", input="And?", stream=stream, extra_body=named
        )
    assert not switch.prompts
