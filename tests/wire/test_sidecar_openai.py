"""The sidecar as OpenAI's own SDK sees it."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from sidecar.app import App
from sidecar.pipeline.template.encoder import PromptEncoder
from testkit.raw_http import eventually, exchange, request
from testkit.servers import num_left, running_sidecar

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Time in a zone",
        "parameters": {"type": "object", "properties": {"tz": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(app: App) -> Iterator[openai.OpenAI]:
    with sdk(app) as client:
        yield client


def sdk(app: App) -> openai.OpenAI:
    url = f"{app.url}/v1"
    return openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=240)


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": text}])
    return client.chat.completions.create(model="local", messages=messages, **more)


def read_stream(chunks: Any) -> Json:
    """A stream joined: choices as in the whole answer, and the usage."""
    choices: dict[int, Json] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said = choices.setdefault(
                choice.index,
                {"content": "", "reasoning": "", "calls": [], "logprobs": []},
            )
            delta = choice.delta
            said["content"] += delta.content or ""
            said["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.id:
                    assert call.index == len(said["calls"])
                    said["calls"].append((call.function.name, ""))
                name, arguments = said["calls"][call.index]
                said["calls"][-1] = (name, arguments + call.function.arguments)
            if choice.logprobs:
                said["logprobs"] += [t.model_dump() for t in choice.logprobs.content]
            said["finish"] = choice.finish_reason
    return {"choices": choices, "usage": usage and usage.model_dump()}


def read_whole(answer: Any) -> Json:
    """A whole answer in the form of `read_stream`."""
    choices = {}
    for choice in answer.choices:
        message = choice.message
        choices[choice.index] = {
            "content": message.content or "",  # null beside calls
            "reasoning": getattr(message, "reasoning_content", None) or "",
            "calls": [
                (call.function.name, call.function.arguments)
                for call in message.tool_calls or []
            ],
            "logprobs": [t.model_dump() for t in choice.logprobs.content]
            if choice.logprobs
            else [],
            "finish": choice.finish_reason,
        }
    return {"choices": choices, "usage": answer.usage.model_dump()}


REQUESTS: dict[str, Json] = {
    "greeting": {"text": "hello"},
    "no thinking": {"text": "What is 3 + 4?", "extra_body": {"enable_thinking": False}},
    "a call": {"text": 'Call get_weather with city="Rome"', "tools": [WEATHER]},
    "two answers": {"text": 'Say "hi there"', "n": 2},
    "stop": {"text": "Reply with exactly: one two three", "stop": ["two"]},
    "cut": {"text": "hello", "max_tokens": 5},
    "logprobs": {"text": 'Say "hi"', "logprobs": True, "top_logprobs": 2},
    "seed": {"text": "hello", "seed": 3, "temperature": 1.0, "n": 2},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_says_what_the_whole_answer_says(
    client: openai.OpenAI, name: str
) -> None:
    """Content, reasoning, calls, logprobs, finish and usage are equal."""
    asked = REQUESTS[name]
    whole = read_whole(ask(client, **asked))
    options = {"include_usage": True}
    streamed = read_stream(ask(client, **asked, stream=True, stream_options=options))
    assert streamed["choices"] == whole["choices"]
    cached = "prompt_tokens_details"
    for usage in (streamed["usage"], whole["usage"]):
        del usage[cached]
        for name in (
            "accepted",
            "rejected",
        ):  # hangs on what a run was measured to cost
            usage["completion_tokens_details"].pop(f"{name}_prediction_tokens", None)
    assert streamed["usage"] == whole["usage"]


def test_reasoning_can_be_switched(client: openai.OpenAI) -> None:
    """On by default; off by any spelling, and then nothing is counted as reasoning."""
    on = ask(client, "hello")
    assert on.choices[0].message.reasoning_content.strip()
    assert on.usage.completion_tokens_details.reasoning_tokens > 0
    for switch in (
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
        {"reasoning": {"enabled": False}},
    ):
        off = ask(client, "hello", extra_body=switch)
        assert not hasattr(off.choices[0].message, "reasoning_content"), switch
        assert off.usage.completion_tokens_details.reasoning_tokens == 0
        assert off.choices[0].message.content == on.choices[0].message.content


def test_usage_counts_tokens(client: openai.OpenAI) -> None:
    """Prompt, answer, and what was already computed for an earlier request."""
    messages = [{"role": "user", "content": "Remember: " + "red blue green " * 40}]
    first = ask(client, "", messages=messages, max_tokens=4).usage
    again = ask(client, "", messages=messages, max_tokens=4).usage
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens
    assert first.prompt_tokens > 120
    assert again.prompt_tokens_details.cached_tokens > 120
    assert again.prompt_tokens_details.cached_tokens < again.prompt_tokens


def test_logprobs_cover_every_token(client: openai.OpenAI) -> None:
    """One entry a token, the best first, probabilities below one."""
    answer = ask(
        client, 'Say "hi"', logprobs=True, top_logprobs=3,
        extra_body={"enable_thinking": False},
    )  # fmt: skip
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "hi"
    for token in tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.bytes).decode() == token.token


def test_a_stop_string_is_never_seen(client: openai.OpenAI) -> None:
    """The answer ends before it."""
    answer = ask(client, **REQUESTS["stop"], extra_body={"enable_thinking": False})
    choice = answer.choices[0]
    assert (choice.message.content.strip(), choice.finish_reason) == ("one", "stop")


def test_the_token_limit_is_told(client: openai.OpenAI) -> None:
    """finish_reason length, and just so many tokens."""
    answer = ask(client, **REQUESTS["cut"])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_a_tool_loop(client: openai.OpenAI) -> None:
    """The model calls, gets the result, and answers with it."""
    messages: list[Json] = [
        {"role": "user", "content": 'Call get_weather with city="Rome" and days=2'}
    ]
    called = ask(client, "", messages=messages, tools=[WEATHER, CLOCK]).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    messages.append(called.message.model_dump(exclude_none=True))
    messages.append(
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 31 degrees"}
    )
    done = ask(client, "", messages=messages, tools=[WEATHER, CLOCK])
    assert done.choices[0].finish_reason == "stop"
    assert "sunny, 31 degrees" in done.choices[0].message.content
    assert done.usage.prompt_tokens_details.cached_tokens > 100


def test_tool_choice_none_calls_nothing_and_changes_no_prompt(
    client: openai.OpenAI,
) -> None:
    """The tools stay in the prompt, and the token that begins a call cannot come."""
    text = 'Call get_weather with city="Rome"'
    free = ask(client, text, tools=[WEATHER])
    assert free.choices[0].message.tool_calls
    held = ask(client, text, tools=[WEATHER], tool_choice="none")
    assert held.choices[0].message.tool_calls is None
    assert "<tool_call>" not in (held.choices[0].message.content or "")
    assert held.usage.prompt_tokens == free.usage.prompt_tokens
    cached = held.usage.prompt_tokens_details.cached_tokens
    assert cached == held.usage.prompt_tokens - 1


def test_a_named_tool_is_called_and_changes_no_prompt(client: openai.OpenAI) -> None:
    """The other tool stays in the prompt: what is kept of that would be lost."""
    text = 'Call get_weather with city="Rome"'
    named = {"type": "function", "function": {"name": "get_weather"}}
    both = ask(client, text, tools=[WEATHER, CLOCK])
    one = ask(client, text, tools=[WEATHER, CLOCK], tool_choice=named)
    assert one.usage.prompt_tokens == both.usage.prompt_tokens
    assert one.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_without_tools_call_markup_is_text(client: openai.OpenAI) -> None:
    """Nobody offered a tool: what looks like a call is content."""
    text = "Reply with exactly: <tool_call> is a tag"
    answer = ask(client, text, extra_body={"enable_thinking": False})
    assert answer.choices[0].message.tool_calls is None


def test_requests_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    """Eight threads: each answer is what it is alone."""
    sums = [f"What is {a} + {a + 2}?" for a in range(3, 11)]
    with ThreadPoolExecutor(len(sums)) as threads:
        together = list(threads.map(lambda text: ask(client, text), sums))
    for text, answer in zip(sums, together, strict=True):
        assert answer.choices[0].message == ask(client, text).choices[0].message


def test_errors_become_the_sdks_exceptions(client: openai.OpenAI) -> None:
    """Status, code and param arrive where the SDK looks for them."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(
            model="gpt-4", messages=[{"role": "user", "content": "x"}]
        )
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, "x", extra_body={"temperature": "hot"})
    assert (bad.value.code, bad.value.param) == ("invalid_request", "temperature")
    with pytest.raises(openai.UnprocessableEntityError) as wrong:
        ask(client, "x", temperature=101)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, "red " * 33_000)
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length is 32768 tokens" in long.value.message


def test_a_raw_prompt_that_is_far_too_long_is_not_read_whole(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 MB of one letter took 9.5 GB, and went on when the client had gone."""
    longest = 0
    encode, count = PromptEncoder.encode, PromptEncoder.count

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(own: PromptEncoder, text: str, **more: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return method(own, text, **more)

        return noted

    monkeypatch.setattr(PromptEncoder, "encode", noting(encode))
    monkeypatch.setattr(PromptEncoder, "count", noting(count))
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="local", prompt="a" * 3_000_000, max_tokens=1)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert longest < 100_000


def test_a_list_of_prompts_takes_no_more_places_than_there_are(
    client: openai.OpenAI,
) -> None:
    """It would take all of them before it is refused."""
    with pytest.raises(openai.BadRequestError) as many:
        client.completions.create(model="local", prompt=["a"] * 73, max_tokens=1)
    assert many.value.param == "prompt"
    assert "at most 72 prompts" in many.value.message


def test_what_is_far_too_long_is_told_like_what_is_a_little(
    client: openai.OpenAI,
) -> None:
    """Only a part of it is read; the probe still answers that it does not fit."""
    text = "red " * 500_000
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, text)
    assert (long.value.code, long.value.param) == (
        "context_length_exceeded",
        "messages",
    )
    assert "maximum context length is 32768 tokens" in long.value.message
    body = {"messages": [{"role": "user", "content": text}]}
    found = client.post("/cache/probe", cast_to=dict[str, object], body=body)
    assert found["fits"] is False
    assert found["prompt_tokens"] > found["max_context_tokens"] > 30_000
    assert found["is_whole"] is False
    body = {**body, "model": "local"}
    with pytest.raises(openai.BadRequestError, match="prompt is too long"):
        client.post("/messages/count_tokens", cast_to=dict[str, object], body=body)


def test_models_are_listed(client: openai.OpenAI) -> None:
    """Id, aliases and context of the one model."""
    (model,) = client.models.list().data
    assert model.id == "openai/mlx-tiny-agent"
    assert model.owned_by == "mlx"
    extra = model.model_dump()
    assert "local" in extra["aliases"]
    assert extra["max_input_tokens"] == 32768


COMPLETIONS: dict[str, Json] = {
    "text": {"prompt": "One two three"},
    "echo": {"prompt": "One two three", "echo": True},
    "list": {"prompt": ["One two", "The red"]},
    "ids": {"prompt": [100, 200, 300]},
    "several lists": {"prompt": [[100, 200], [300]]},
    "two of each": {"prompt": ["One two", "The red"], "n": 2, "echo": True},
    "logprobs": {"prompt": [100, 200, 300], "logprobs": 2},
    "stop": {"prompt": "One two three", "stop": ["e"]},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_raw_completion_streams_what_it_says_whole(
    client: openai.OpenAI, name: str
) -> None:
    """Legacy completions: texts, logprobs, finishes and usage are equal."""
    asked = {"model": "local", "max_tokens": 6, "temperature": 0, **COMPLETIONS[name]}
    whole = client.completions.create(**asked)
    texts: dict[int, str] = {}
    finishes, tokens, usage = {}, [], None
    options = {"include_usage": True}
    for chunk in client.completions.create(
        **asked, stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finishes[choice.index] = choice.finish_reason
            tokens += choice.logprobs.tokens if choice.logprobs else []
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens
    if name == "logprobs":
        assert tokens == whole.choices[0].logprobs.tokens
        assert len(tokens) == whole.usage.completion_tokens == 6
    if name == "two of each":
        starts = [choice.text[:7] for choice in whole.choices]
        assert starts == ["One two", "One two", "The red", "The red"]


def test_order_on_the_wire(app: App) -> None:
    """Role, deltas, usage with no choices, finish, [DONE]; nothing in between."""
    body = {
        "messages": [{"role": "user", "content": 'Say "hi"'}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = exchange(app.listener.port, request(CHAT, json.dumps(body).encode()))
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    lines = answer.body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] > 0
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_half_a_surrogate_pair_in_past_arguments(app: App) -> None:
    """A past call may hold an escape that is no text: 200 or 400, never 500."""
    function = {"name": "f", "arguments": '{"a": "\\ud83d"}'}
    call = {"id": "c", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    body = json.dumps({"messages": messages, "max_tokens": 2}).encode()
    assert exchange(app.listener.port, request(CHAT, body)).status < 500


def test_a_seed_repeats_over_http(client: openai.OpenAI) -> None:
    """Same seed, same answer; another seed, another one."""
    extra = {"enable_thinking": False, "top_k": 0, "min_p": 0}

    def draw(seed: int) -> str:
        answer = ask(
            client, "hello", seed=seed, temperature=3.0, top_p=1, max_tokens=12,
            extra_body=extra,
        )  # fmt: skip
        return str(answer.choices[0].message.content)

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) == 4


@pytest.fixture(scope="module")
def endless(model_folder: Callable[[str], Path]) -> Iterator[App]:
    """A model that never ends its turn, for what happens in mid-answer."""
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        yield app


def test_a_closed_stream_frees_the_engine(endless: App) -> None:
    """The SDK's stream is closed after some chunks: the lease comes back."""
    before = num_left(endless)
    with sdk(endless) as client:
        stream = ask(client, "x", stream=True, max_tokens=30_000)
        for _ in range(5):
            next(stream)
        assert endless.pool.num_leases == 1
        stream.close()
        assert eventually(lambda: endless.pool.num_leases == 0)
    assert num_left(endless) == before + 1


def test_a_timeout_of_the_sdk_frees_the_engine(endless: App) -> None:
    """A whole answer that its client no longer waits for is not computed on."""
    before = num_left(endless)
    with sdk(endless).with_options(timeout=0.5) as client:
        with pytest.raises(openai.APITimeoutError):
            ask(client, "x", max_tokens=30_000)
        assert eventually(lambda: endless.pool.num_leases == 0)
    assert num_left(endless) == before + 1
