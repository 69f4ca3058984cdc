"""
Messages and Responses as the SDKs speak them, to the sidecar and through LiteLLM.

LiteLLM sends both on as they are, so that what a client echoes is what it was sent.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from sidecar.app import App
from testkit.proxy import Proxy
from testkit.scripted import Answer, Call, Switch, render

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

TOOL: Any = {
    "name": "read", "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}  # fmt: skip
ASKED: Any = {"role": "user", "content": "Read a.txt."}
FIRST = Answer("A file is wanted.", "", (Call("read", {"path": "a.txt"}),))
SECOND = Answer("It is read.", "alpha.")


@pytest.fixture(params=["direct", "proxy"])
def clients(
    request: pytest.FixtureRequest, proxy: Proxy, scripted_sidecar: App, switch: Switch
) -> Iterator[tuple[anthropic.Anthropic, openai.OpenAI]]:
    """Both SDKs, at the sidecar itself and at the proxy; the answers are scripted."""
    answers = [FIRST, SECOND, SECOND]
    switch.prompts.clear()
    switch.script = lambda prompt: render(answers[prompt.num_answers], prompt)
    if request.param == "proxy":
        yield proxy.anthropic, proxy.openai
        return
    url, same = scripted_sidecar.url, {"api_key": "any", "max_retries": 0}
    with (
        anthropic.Anthropic(base_url=url, **same) as messages,
        openai.OpenAI(base_url=f"{url}/v1", **same) as responses,
    ):
        yield messages, responses


Clients = tuple[anthropic.Anthropic, openai.OpenAI]


def ask(client: anthropic.Anthropic, stream: bool, *turns: Any, **more: Any) -> Any:
    """A message, whole or put together from its stream."""
    body: Any = {"model": "local", "max_tokens": 500, "tools": [TOOL], **more}
    if not stream:
        return client.messages.create(messages=turns, **body)
    with client.messages.stream(messages=turns, **body) as events:
        return events.get_final_message()


def echo(message: Any) -> Any:
    """A message as it is sent back."""
    content = [block.model_dump(exclude_none=True) for block in message.content]
    return {"role": "assistant", "content": content}


def result(message: Any) -> Any:
    """The answer to its call."""
    block = {"type": "tool_result", "tool_use_id": message.content[-1].id,
             "content": "alpha"}  # fmt: skip
    return {"role": "user", "content": [block]}


@pytest.mark.parametrize("path", [10**20, "cut \ud83d"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_arguments_beyond_what_orjson_prints(
    clients: Clients, switch: Switch, stream: bool, path: Any
) -> None:
    """A large integer, and half a sign: whole, streamed, and sent back."""
    raw = json.dumps({"name": "read", "arguments": {"path": path}})
    answers = [f"<tool_call>\n{raw}\n</tool_call>", "It is read."]
    switch.script = lambda prompt: answers[prompt.num_answers]
    messages, _ = clients
    called = ask(messages, stream, ASKED)
    said = called.content[-1].input["path"]
    assert said in (path, "cut \ufffd")
    body = {"model": "local", "max_tokens": 50, "tools": [TOOL], "messages": [
        ASKED, {**echo(called), "content": [
            {"type": "tool_use", "id": called.content[-1].id, "name": "read",
             "input": {"path": path}}]}, result(called)]}  # fmt: skip
    # As JavaScript sends it: the escape of half a pair, which httpx would refuse.
    sent = messages._client.post(
        "/v1/messages", content=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "x-api-key": "any"},
    )  # fmt: skip
    assert sent.status_code == 200, sent.text
    assert sent.json()["content"][-1]["text"] == "It is read."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_thinking_is_signed_and_its_turn_known_again(
    clients: Clients, switch: Switch, stream: bool
) -> None:
    """No text block that is empty; the next prompt goes on where this one ended."""
    first = ask(clients[0], stream, ASKED)
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert first.content[0].signature.startswith("mlx1.")
    second = ask(clients[0], stream, ASKED, echo(first), result(first))
    held = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    held += first.usage.output_tokens
    assert second.usage.cache_read_input_tokens >= held - 1
    assert second.usage.output_tokens_details.thinking_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_thinking_that_is_not_shown_is_put_back_all_the_same(
    clients: Clients, switch: Switch, stream: bool
) -> None:
    """What `claude -p` asks for."""
    hidden = {"type": "adaptive", "display": "omitted"}
    more = {"extra_body": {"thinking": hidden}}
    first = ask(clients[0], stream, ASKED, **more)
    assert first.content[0].thinking == ""
    assert first.content[0].signature.startswith("mlx1.")
    second = ask(clients[0], stream, ASKED, echo(first), result(first), **more)
    assert FIRST.reasoning in switch.prompts[-1].text
    assert second.usage.cache_read_input_tokens > 0


def test_the_start_of_a_message_tells_what_is_reused(clients: Clients) -> None:
    ask(clients[0], True, ASKED)
    with clients[0].messages.stream(
        model="local", max_tokens=50, messages=[ASKED], tools=[TOOL]
    ) as events:
        start: Any = next(event for event in events if event.type == "message_start")
    usage = start.message.usage
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens >= 1


@pytest.mark.parametrize("with_tools", [False, True], ids=["words", "tools"])
def test_tokens_are_counted_by_the_models_own_tokenizer(
    clients: Clients, with_tools: bool
) -> None:
    """Directly and through LiteLLM, whose own estimate knows no template."""
    more: Any = {"tools": [TOOL], "system": "Be brief."} if with_tools else {}
    asked: Any = {"model": "local", "messages": [ASKED], **more}
    counted = clients[0].messages.count_tokens(**asked)
    usage = clients[0].messages.create(max_tokens=1, **asked).usage
    cached = usage.cache_read_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + cached


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_goes_on_by_its_id(
    clients: Clients, switch: Switch, stream: bool
) -> None:
    """The model sees its own past, thinking and all, though no item is sent again."""
    tool: Any = {"type": "function", "name": "read", "strict": False,
                 "parameters": TOOL["input_schema"]}  # fmt: skip
    same: Any = {"model": "local", "tools": [tool], "instructions": "Be brief."}
    first = respond(clients[1], stream, input="Read a.txt.", **same)
    call = first.output[-1]
    output: Any = {"type": "function_call_output", "call_id": call.call_id,
                   "output": "alpha"}  # fmt: skip
    second = respond(
        clients[1], stream, input=[output], previous_response_id=first.id, **same
    )
    assert second.output_text == SECOND.text
    assert FIRST.reasoning in switch.prompts[-1].text
    details = second.usage.input_tokens_details
    assert details.cached_tokens >= first.usage.total_tokens - 1


def respond(client: openai.OpenAI, stream: bool, **body: Any) -> Any:
    """A response, whole or the last of its stream."""
    if not stream:
        return client.responses.create(**body)
    with client.responses.stream(**body) as events:
        return events.get_final_response()


def test_items_may_be_named_by_their_ids(clients: Clients, switch: Switch) -> None:
    """As the Agents SDK and Vercel's do where responses are stored."""
    first = clients[1].responses.create(model="local", input="Read a.txt.")
    items: Any = [
        {"role": "user", "content": "Read a.txt."},
        *({"type": "item_reference", "id": item.id} for item in first.output),
        {"role": "user", "content": "And?"},
    ]
    clients[1].responses.create(model="local", input=items)
    assert FIRST.reasoning in switch.prompts[-1].text


def test_a_past_that_is_not_kept_is_refused(clients: Clients) -> None:
    """400, not an answer of a model that does not see it."""
    reference = {"type": "item_reference", "id": "rs_unknown"}
    unknown = ({"previous_response_id": "resp_unknown"}, {"input": [reference]})
    for more in unknown:
        body: Any = {"model": "local", "input": "And?", **more}
        with pytest.raises(openai.BadRequestError, match="send the items"):
            clients[1].responses.create(**body)


def test_reasoning_items_have_a_summary_and_deltas_their_index(
    clients: Clients,
) -> None:
    """Without both the AI SDK and the Agents SDK refuse the answer."""
    whole: Any = clients[1].responses.create(model="local", input="Read a.txt.")
    assert whole.output[0].summary == []
    with clients[1].responses.stream(
        model="local", input="Read a.txt.", reasoning={"summary": "auto"}
    ) as events:
        seen: list[Any] = list(events)
    names = [event.type for event in seen]
    assert "response.reasoning_summary_part.added" in names
    deltas = [e for e in seen if e.type == "response.reasoning_summary_text.delta"]
    assert {event.summary_index for event in deltas} == {0}


def test_what_litellm_cuts_from_a_body_arrives_all_the_same(
    proxy: Proxy, scripted_sidecar: App, switch: Switch
) -> None:
    """`enable_thinking` is no field of either format, and LiteLLM drops it."""
    switch.script = lambda prompt: "Plain."
    for path, body in (
        ("/v1/messages", {"messages": [ASKED], "max_tokens": 20}),
        ("/v1/responses", {"input": "Read a.txt."}),
    ):
        switch.prompts.clear()
        sent = {"model": "local", "enable_thinking": False, **body}
        answer = proxy.http.post(path, json=sent, headers={"authorization": "Bearer a"})
        assert answer.status_code == 200, answer.text
        assert "<think>\n\n</think>" in switch.prompts[-1].text


def test_who_asks_is_told_beside_every_body(
    proxy: Proxy, scripted_sidecar: App, switch: Switch
) -> None:
    """Values and responses never cross keys, whatever the format."""
    switch.script = lambda prompt: "Plain."
    posted = proxy.http.post(
        "/v1/responses", json={"model": "local", "input": "hi"},
        headers={"authorization": "Bearer one"},
    ).json()  # fmt: skip
    with scripted_sidecar.pool.lease("local") as served:
        last = list(served.memory.lineage._records.values())[-1]
        claim = {"key": last.conversation.tenant}
    again = {"model": "local", "input": "hi", "previous_response_id": posted["id"]}
    codes = [
        proxy.http.post(
            "/v1/responses", json=again, headers={"authorization": f"Bearer {key}"}
        ).status_code
        for key in ("one", "two")
    ]
    assert codes == [200, 400]
    for fields in ({"x_mlx": claim}, {"extra_body": {"x_mlx": claim}}):
        answer = proxy.http.post(
            "/v1/responses", json={**again, **fields},
            headers={"authorization": "Bearer two"},
        )  # fmt: skip
        assert answer.status_code == 400, "another key's answers were read"


def test_errors_have_the_formats_own_shape(scripted_sidecar: App) -> None:
    """Before the first byte: a status and Anthropic's error object."""
    answer = httpx.post(f"{scripted_sidecar.url}/v1/messages", json={"messages": []})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_googles_format_is_made_a_chat_by_litellm(
    proxy: Proxy, switch: Switch, stream: bool
) -> None:
    """With its tools; who asks is told as for all other formats."""
    switch.prompts.clear()
    switch.script = lambda prompt: render(FIRST, prompt)
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    declared = {"name": "read", "description": "d", "parameters": parameters}
    body = {
        "contents": [{"role": "user", "parts": [{"text": "Read a.txt."}]}],
        "tools": [{"functionDeclarations": [declared]}],
    }
    way = "streamGenerateContent?alt=sse" if stream else "generateContent"
    answer = proxy.http.post(
        f"/v1beta/models/local:{way}", json=body, headers={"x-goog-api-key": "any"}
    )
    assert answer.status_code == 200, answer.text
    assert '"functionCall"' in answer.text
    assert '"path"' in answer.text
    assert "Read a.txt." in switch.prompts[-1].text
