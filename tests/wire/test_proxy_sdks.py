"""
The official SDKs through the real proxy: three dialects, one answer.

Each `ask_*` sends a conversation in its dialect, streamed or not, and brings the
answer back in one form; each conversation is two turns long, so that what a client
echoes is judged as well.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.proxy import Proxy
from testkit.scripted import Answer, Call, Switch, render

# Raised where the SDK prints LiteLLM's Responses objects, which are its own kind.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

SYSTEM = "You are a careful agent."
QUESTION = "Read a.txt and b.txt."
RESULTS = ("alpha", "beta")
PATH = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
}
TOOL = {"name": "read", "description": "Read a file", "parameters": PATH}
CALLS = (Call("read", {"path": "a.txt"}), Call("read", {"path": "b.txt"}))
FIRST = Answer("Two files are wanted.\nI read both.", "I read them.", CALLS)
SECOND = Answer("Both are read.", "alpha and beta.")


@dataclass(frozen=True)
class Got:
    """
    An answer in no dialect.

    Args:
        kinds: the parts in order.
        echo: the parts in the dialect's own form, as the next request sends them.
    """

    kinds: list[str]
    reasoning: str
    text: str
    calls: list[tuple[str, str, Any]]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int | None
    echo: list[Any]


Ask = Callable[[Proxy, list[Any], bool], Got]


def ask_chat(proxy: Proxy, messages: list[Any], stream: bool) -> Got:
    """POST /v1/chat/completions."""
    body: Any = {
        "model": "local",
        "messages": [{"role": "system", "content": SYSTEM}, *messages],
        "tools": [{"type": "function", "function": TOOL}],
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
        with proxy.openai.chat.completions.stream(**body) as events:
            for _ in events:
                pass
            answer = events.get_final_completion()
    else:
        answer = proxy.openai.chat.completions.create(**body)
    message: Any = answer.choices[0].message
    usage: Any = answer.usage
    calls = message.tool_calls or []
    parts = [
        ("reasoning", message.reasoning_content),
        ("text", message.content),
        *(("call", call) for call in calls),
    ]
    return Got(
        [kind for kind, part in parts if part],
        message.reasoning_content,
        message.content,
        [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls],
        answer.choices[0].finish_reason,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens,
        usage.completion_tokens,
        usage.completion_tokens_details.reasoning_tokens,
        [_without(message.model_dump(exclude_none=True), "parsed")],
    )


def ask_messages(proxy: Proxy, messages: list[Any], stream: bool) -> Got:
    """POST /v1/messages."""
    body: Any = {
        "model": "local",
        "max_tokens": 2048,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": SYSTEM,
        "messages": messages,
        "tools": [
            {"name": "read", "description": "Read a file", "input_schema": PATH},
        ],
    }
    if stream:
        with proxy.anthropic.messages.stream(**body) as events:
            for _ in events:
                pass
            answer = events.get_final_message()
    else:
        answer = proxy.anthropic.messages.create(**body)
    blocks: list[Any] = list(answer.content)
    names = {"thinking": "reasoning", "text": "text", "tool_use": "call"}
    usage = answer.usage
    cached = usage.cache_read_input_tokens or 0
    content = [block.model_dump(exclude_none=True) for block in blocks]
    return Got(
        [names[block.type] for block in blocks],
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        "".join(block.text for block in blocks if block.type == "text"),
        [(b.id, b.name, b.input) for b in blocks if b.type == "tool_use"],
        str(answer.stop_reason),
        usage.input_tokens + cached,
        cached,
        usage.output_tokens,
        None,  # the dialect has no place for it
        [{"role": "assistant", "content": content}],
    )


def ask_responses(proxy: Proxy, messages: list[Any], stream: bool) -> Got:
    """POST /v1/responses."""
    body: Any = {
        "model": "local",
        "instructions": SYSTEM,
        "input": messages,
        "tools": [{"type": "function", "strict": False, **TOOL}],
        "store": False,
    }
    if stream:
        with proxy.openai.responses.stream(**body) as events:
            for _ in events:
                pass
            answer: Any = events.get_final_response()
    else:
        answer = proxy.openai.responses.create(**body)
    names = {"reasoning": "reasoning", "message": "text", "function_call": "call"}
    items = answer.output
    usage = answer.usage
    thoughts = [item for item in items if item.type == "reasoning"]
    calls = [item for item in items if item.type == "function_call"]
    return Got(
        [names[item.type] for item in items],
        "".join(part.text for item in thoughts for part in item.content),
        answer.output_text,
        [(call.call_id, call.name, json.loads(call.arguments)) for call in calls],
        answer.status,
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.output_tokens,
        usage.output_tokens_details.reasoning_tokens,
        [_without(item.model_dump(exclude_none=True), "parsed") for item in items],
    )


def _without(value: Any, name: str) -> Any:
    """The SDK's own additions must not be echoed."""
    if isinstance(value, dict):
        return {k: _without(v, name) for k, v in value.items() if name not in k}
    return [_without(v, name) for v in value] if isinstance(value, list) else value


def chat_results(got: Got) -> list[Any]:
    """Both results, as Chat sends them."""
    pairs = zip(got.calls, RESULTS, strict=True)
    return [
        {"role": "tool", "tool_call_id": call[0], "content": text}
        for call, text in pairs
    ]


def messages_results(got: Got) -> list[Any]:
    """Both results, as Messages sends them."""
    pairs = zip(got.calls, RESULTS, strict=True)
    blocks = [
        {"type": "tool_result", "tool_use_id": call[0], "content": text}
        for call, text in pairs
    ]
    return [{"role": "user", "content": blocks}]


def responses_results(got: Got) -> list[Any]:
    """Both results, as Responses sends them."""
    pairs = zip(got.calls, RESULTS, strict=True)
    return [
        {"type": "function_call_output", "call_id": call[0], "output": text}
        for call, text in pairs
    ]


DIALECTS: list[Any] = [
    pytest.param(ask_chat, chat_results, ("tool_calls", "stop"), id="chat"),
    pytest.param(
        ask_messages, messages_results, ("tool_use", "end_turn"), id="messages"
    ),
    pytest.param(
        ask_responses, responses_results, ("completed", "completed"), id="responses"
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("ask", "results", "finishes"), DIALECTS)
def test_two_turns_with_tools(
    proxy: Proxy,
    switch: Switch,
    ask: Ask,
    results: Callable[[Got], list[Any]],
    finishes: tuple[str, str],
    stream: bool,
) -> None:
    """Every part in order, two calls with ids, and the echo extends the first turn."""
    answers = [FIRST, SECOND]
    switch.prompts.clear()
    switch.script = lambda prompt: render(answers[prompt.num_answers], prompt)
    question = [{"role": "user", "content": QUESTION}]
    first = ask(proxy, question, stream)
    assert first.kinds == ["reasoning", "text", "call", "call"]
    assert_says(first, FIRST)
    assert len({call_id for call_id, _, _ in first.calls}) == 2
    assert first.finish == finishes[0]

    second = ask(proxy, [*question, *first.echo, *results(first)], stream)
    assert second.kinds == ["reasoning", "text"]
    assert_says(second, SECOND)
    assert second.finish == finishes[1]

    prompts = [prompt.text for prompt in switch.prompts]
    said = render(FIRST, switch.prompts[0])
    assert prompts[1].startswith(prompts[0] + said + "<|im_end|>\n")
    assert second.cached_tokens >= first.prompt_tokens + first.output_tokens
    assert second.prompt_tokens > second.cached_tokens


def assert_says(got: Got, wanted: Answer) -> None:
    """The parts are the scripted ones; some of the output went to reasoning."""
    assert got.reasoning.strip("\n") == wanted.reasoning
    assert got.text == wanted.text
    assert [Call(name, value) for _, name, value in got.calls] == list(wanted.calls)
    if got.reasoning_tokens is not None:
        assert 0 < got.reasoning_tokens < got.output_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("ask", "results", "finishes"), DIALECTS)
def test_usage_is_the_sidecars_own(
    proxy: Proxy,
    switch: Switch,
    scripted_sidecar: App,
    ask: Ask,
    results: Any,
    finishes: Any,
    stream: bool,
) -> None:
    """To the token; LiteLLM would estimate where it lost the numbers."""
    switch.script = lambda prompt: render(FIRST, prompt)
    messages = [{"role": "user", "content": QUESTION}]
    ask(proxy, messages, stream)  # now both find the same prefix stored
    got = ask(proxy, messages, stream)
    body = {
        "model": "local",
        "messages": [{"role": "system", "content": SYSTEM}, *messages],
        "tools": [{"type": "function", "function": TOOL}],
    }
    url = f"{scripted_sidecar.url}/v1/chat/completions"
    own = httpx.post(url, json=body, timeout=60).json()["usage"]
    assert got.prompt_tokens == own["prompt_tokens"]
    assert got.output_tokens == own["completion_tokens"]
    assert got.cached_tokens == own["prompt_tokens_details"]["cached_tokens"] > 0
    if got.reasoning_tokens is not None:
        details = own["completion_tokens_details"]
        assert got.reasoning_tokens == details["reasoning_tokens"]


def test_reasoning_and_calls_stream_as_deltas(proxy: Proxy, switch: Switch) -> None:
    """Reasoning comes in pieces, each call under its index, the reason last."""
    switch.script = lambda prompt: render(FIRST, prompt)
    chunks: list[Any] = list(
        proxy.openai.chat.completions.create(
            model="local",
            messages=[{"role": "user", "content": QUESTION}],
            tools=[{"type": "function", "function": TOOL}],  # type: ignore[list-item]
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    deltas = [choice.delta for choice in choices]
    reasoning = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert len([piece for piece in reasoning if piece]) > 3
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls if call.id] == [0, 1]
    finishes = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert finishes == ["tool_calls"]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_cut_answer_says_so(proxy: Proxy, switch: Switch, stream: bool) -> None:
    """`length` in Chat, `max_tokens` in Messages."""
    switch.script = lambda prompt: "one two three four five six seven eight"
    question: Any = [{"role": "user", "content": QUESTION}]
    with proxy.openai.chat.completions.with_streaming_response.create(
        model="local", messages=question, max_tokens=4, stream=stream
    ) as response:
        assert '"finish_reason":"length"' in response.read().decode().replace(" ", "")
    with proxy.anthropic.messages.with_streaming_response.create(
        model="local", messages=question, max_tokens=4, stream=stream
    ) as response:
        assert '"stop_reason":"max_tokens"' in response.read().decode().replace(" ", "")
