"""What a chat or a completion asks for, through LiteLLM: done, refused, or named."""

from typing import Any

import httpx
import openai
import pytest

from sidecar.app import App
from testkit.proxy import Proxy
from testkit.scripted import Switch

HEADER = "x-litellm-mlx-ignored"
Json = dict[str, Any]
TALK: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": TALK,
    "/v1/messages": TALK,
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/completions": {"prompt": "one", "max_tokens": 2},
}
CUSTOM: Json = {"type": "custom", "custom": {"name": "patch", "description": "Edit."}}
CALL = (
    '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\nx"}}</tool_call>'
)


def post(proxy: Proxy, route: str, **more: Any) -> httpx.Response:
    body = {"model": "builtin", **BODIES[route], **more}
    return proxy.http.post(route, json=body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_what_is_asked_for_in_vain_is_named(
    proxy: Proxy, route: str, stream: bool
) -> None:
    """In one header, on every route, whole and streamed; else there is none."""
    answer = post(proxy, route, stream=stream, odd_wish=1)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, "odd_wish")
    answer = post(proxy, route, stream=stream)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, None)


@pytest.mark.parametrize(
    "wish",
    [
        {"service_tier": "priority"},
        {"web_search_options": {"search_context_size": "low"}},
        {"verbosity": "low"},
        {"store": True},
        {"user": "u1"},
        {"prompt_cache_retention": "24h"},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_what_litellm_knows_is_named_too(proxy: Proxy, wish: Json) -> None:
    answer = post(proxy, "/v1/chat/completions", **wish)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, next(iter(wish)))


@pytest.mark.parametrize(
    ("route", "wish"),
    [
        ("/v1/chat/completions", {"modalities": ["text", "audio"]}),
        ("/v1/chat/completions", {"reasoning_effort": "banana"}),
        ("/v1/chat/completions", {"adapters": "lora"}),
        ("/v1/completions", {"suffix": "the end"}),
        ("/v1/completions", {"logprobs": 2, "echo": True}),
        ("/v1/completions", {"logprobs": 2, "stream": True}),
    ],
)
def test_what_would_make_another_answer_is_refused(
    proxy: Proxy, route: str, wish: Json
) -> None:
    answer = post(proxy, route, **wish)
    assert answer.status_code == 400
    assert f"{next(iter(wish))} must be" in answer.text


def test_minus_one_is_no_limit(proxy: Proxy, switch: Switch) -> None:
    switch.script = lambda _prompt: "word " * 40
    answer = proxy.openai.chat.completions.create(
        model="local", messages=[{"role": "user", "content": "hi"}], max_tokens=-1
    )
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].message.content or "").count("word") == 40


def test_a_raw_completion_is_raw(proxy: Proxy, switch: Switch) -> None:
    """Without the chat template; the prompt is what the model read."""
    switch.prompts.clear()
    switch.script = lambda _prompt: " upon a time"
    asked = {"model": "local", "prompt": "Once", "max_tokens": 20}
    answer = proxy.openai.completions.create(**asked, echo=True)
    assert answer.choices[0].text == "Once upon a time"
    assert answer.usage
    assert answer.usage.prompt_tokens < 4
    chunks = proxy.openai.completions.create(**asked, stream=True)
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(text or "" for text in texts) == " upon a time"


def test_several_prompts_are_several_answers(proxy: Proxy, switch: Switch) -> None:
    """One chat was made of all of them."""
    switch.script = lambda _prompt: "so"
    asked = {"model": "local", "prompt": ["one", "two"], "max_tokens": 4}
    answer = proxy.openai.completions.create(**asked, echo=True, n=2)
    texts = [choice.text for choice in answer.choices]
    assert texts == ["oneso", "oneso", "twoso", "twoso"]
    told = ["", ""]
    for chunk in proxy.openai.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            told[choice.index] += choice.text or ""
    assert told == ["so", "so"]


def test_a_number_of_logprobs(proxy: Proxy) -> None:
    """A number in completions, where a chat has true or false."""
    answer = proxy.openai.completions.create(
        model="builtin", prompt="one", max_tokens=3, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    tokens, tops = logprobs.tokens or [], logprobs.top_logprobs or []
    assert [len(top) for top in tops] == [2] * len(tokens) != []
    starts = [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert logprobs.text_offset == starts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["sidecar", "proxy"])
def test_a_custom_tool_is_called_with_one_text(
    proxy: Proxy, scripted_sidecar: App, switch: Switch, where: str, stream: bool
) -> None:
    """As the openai client reads it, and as it sends it in the next turn."""
    url = {"sidecar": scripted_sidecar.url, "proxy": proxy.url}[where]
    switch.script = lambda prompt: "Done." if "Begin" in str(prompt) else CALL
    asked: Json = {"model": "local", "tools": [CUSTOM]}
    talk: list[Any] = [{"role": "user", "content": "patch it"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        if stream:
            call = None
            with client.chat.completions.stream(messages=talk, **asked) as events:
                for chunk in events:
                    delta = getattr(chunk, "chunk", None)
                    if delta and delta.choices and delta.choices[0].delta.tool_calls:
                        call = delta.choices[0].delta.tool_calls[0].model_dump()
        else:
            whole = client.chat.completions.create(messages=talk, **asked)
            call = whole.choices[0].message.tool_calls[0].model_dump()  # type: ignore
        assert call
        assert call["type"] == "custom"
        assert call["custom"] == {"name": "patch", "input": "*** Begin\nx"}
        past = {k: call[k] for k in ("id", "type", "custom")}
        talk += [{"role": "assistant", "tool_calls": [past]}]
        talk += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
        after = client.chat.completions.create(messages=talk, **asked)
    assert after.choices[0].message.content == "Done."


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_was_drafted_is_counted_through_litellm(
    app: App, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    """OpenAI's client sends what it expects, and reads how much of it was right."""
    with app.pool.lease("local") as served:
        prices = served.engine._loop._decode_batches.prices
    monkeypatch.setattr(prices, "of", lambda length: 1.0)  # whatever was measured
    talk: Any = [{"role": "user", "content": "Say where the lamps are."}]
    asked: Any = {"model": "builtin", "messages": talk, "temperature": 0}
    first = proxy.openai.chat.completions.create(**asked, max_tokens=60)
    message = first.choices[0].message
    said = getattr(message, "reasoning_content", None) or message.content
    asked |= {"max_tokens": 60, "prediction": {"type": "content", "content": said}}
    if is_streamed:
        options = {"include_usage": True}
        stream = proxy.openai.chat.completions.create(
            **asked, stream=True, stream_options=options
        )
        usage = next(chunk.usage for chunk in stream if chunk.usage)
    else:
        again = proxy.openai.chat.completions.create(**asked)
        assert again.choices[0].message.content == message.content
        usage = again.usage
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens >= 0


@pytest.mark.parametrize("route", BODIES)
def test_a_context_rotates_through_litellm(proxy: Proxy, app: App, route: str) -> None:
    """It is done on every route; the sidecar's own page says so."""
    words = "Tell me of many things that are far away. " * 20
    long = {name: words for name in BODIES[route] if name in ("input", "prompt")}
    if not long:
        long = {"messages": [{"role": "user", "content": words}]}
    whole = post(proxy, route, **long)
    answer = post(proxy, route, **long, context_len=64)
    assert (answer.status_code, HEADER in answer.headers) == (200, False), answer.text
    assert "x_context_rotated" not in whole.text
    assert "x_context_rotated" in answer.text
    refused = post(proxy, route, **long, context_len=3)
    assert refused.status_code == 400
    assert "context_len must be 16.." in refused.text
