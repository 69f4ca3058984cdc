"""OpenAI chat and completion: requests in; whole answers and streams out."""

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.errors import BadRequest, SidecarError, ValidationFailed
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    Idle,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    Usage,
)
from sidecar.core.requests import ChatRequest, Message, ToolCall
from sidecar.dialects.openai_chat.request import format_chat, parse_chat
from sidecar.dialects.openai_chat.stream import ChatChunks, OpenAIStream
from sidecar.dialects.openai_completions import CompletionFormat, parse_completion
from testkit.call_texts import whole_call

Json = dict[str, Any]
USAGE = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
HELLO = [{"role": "user", "content": "hi"}]
LOGPROB = TokenLogprob("é", 7, -0.5, (("é", 7, -0.5), ("e", 3, -1.5)))


def join(chunks: Iterable[Json], n: int) -> list[Json]:
    """A stream's chunks put together as a client does: one message a choice."""
    joined: list[Json] = [
        {"message": {"content": ""}, "logprobs": None, "finish_reason": None}
        for _ in range(n)
    ]
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = joined[choice["index"]]
            for key, value in choice["delta"].items():
                _add(whole["message"], key, value)
            if choice["logprobs"]:
                whole["logprobs"] = whole["logprobs"] or {"content": []}
                whole["logprobs"]["content"] += choice["logprobs"]["content"]
            assert whole["finish_reason"] is None, "a chunk after the finish"
            whole["finish_reason"] = choice["finish_reason"]
    return joined


def _add(message: Json, key: str, value: Any) -> None:
    if key == "tool_calls":
        calls = message.setdefault(key, [])
        (part,) = value
        if "id" in part:
            assert part["index"] == len(calls)
            calls.append({k: v for k, v in part.items() if k != "index"})
            return
        assert part.keys() == {"index", "function"}
        assert part["index"] == len(calls) - 1
        function = calls[-1]["function"]
        calls[-1]["function"] = {
            **function,
            "arguments": function["arguments"] + part["function"]["arguments"],
        }
    elif key == "role":
        message[key] = value
    else:
        message[key] = message.get(key, "") + value


def stream(events: list[Event], n: int, *, usage: bool = True) -> list[Json]:
    chunks = ChatChunks("m", n, include_usage=usage)
    return all_frames(chunks, events)


def all_frames(
    chunks: ChatChunks | CompletionFormat, events: list[Event]
) -> list[Json]:
    """Every chunk of a response, in order."""
    frames = [*chunks.opening()]
    for event in events:
        frames += chunks.frames_of(event)
    return frames


texts = st.text("ab é\n", min_size=1, max_size=5)
logprobs = st.sampled_from([(), (LOGPROB,), (LOGPROB, LOGPROB)])
deltas = st.lists(
    st.builds(ReasoningDelta, st.integers(0, 1), texts, logprobs)
    | st.builds(TextDelta, st.integers(0, 1), texts, logprobs)
    | st.just(Idle()),
    max_size=10,
)
call_counts = st.tuples(st.integers(0, 2), st.integers(0, 2))


@given(deltas, call_counts)
def test_a_stream_joined_is_the_whole_answer(
    said: list[Event], num_calls: tuple[int, int]
) -> None:
    """Any events of two choices: the chunks put together are the non-stream body."""
    events = list(said)
    for choice, count in enumerate(num_calls):
        for index in range(count):
            call = ToolCall(f"call_{choice}{index}", "f", '{"a":1}')
            events += whole_call(choice, index, call)
        events.append(ChoiceFinished(choice, "tool_calls" if count else "length"))
    events.append(Finished(USAGE))
    whole = format_chat(events, "m", 2)
    for choice in whole["choices"]:  # no text beside calls: null here, none there
        choice["message"]["content"] = choice["message"]["content"] or ""
    expected = [
        {key: value for key, value in choice.items() if key != "index"}
        for choice in whole["choices"]
    ]
    assert join(stream(events, 2), 2) == expected


EVENTS: list[Event] = [
    ReasoningDelta(0, "hm"),
    TextDelta(0, "Hel"),
    Idle(),
    TextDelta(0, "lo"),
    *whole_call(0, 0, ToolCall("call_1", "f", "{}")),
    ChoiceFinished(0, "tool_calls"),
    Finished(USAGE),
]


def test_order_of_a_stream() -> None:
    """Role first, one field a chunk, usage, then the finish, all under one id."""
    chunks = stream(EVENTS, 1)
    kinds = [
        next(iter(c["choices"][0]["delta"]), "finish") if c["choices"] else "usage"
        for c in chunks
    ]
    assert kinds == [
        "role", "reasoning_content", "content", "content", "tool_calls", "tool_calls",
        "usage", "finish",
    ]  # fmt: skip
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", chunks[0]["id"])
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert reasons == [None] * 6 + ["tool_calls"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_usage_comes_only_if_asked() -> None:
    """Without include_usage no chunk has it; with it, it has all counts."""
    assert all("usage" not in chunk for chunk in stream(EVENTS, 1, usage=False))
    assert stream(EVENTS, 1)[-2]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_an_idle_moment_is_no_chunk() -> None:
    """The server asks for a ping when it has been silent for long."""
    chunks = ChatChunks("m", 1, include_usage=False)
    assert list(chunks.frames_of(Idle())) == []
    assert OpenAIStream(chunks).ping() == b": keepalive\n\n"
    through_litellm = OpenAIStream(chunks, chunks.keepalive).ping()
    assert json.loads(through_litellm.removeprefix(b"data: "))["choices"]


def test_the_finish_chunks_of_all_choices_come_last() -> None:
    """A choice that ends early does not end the stream for a client."""
    events = [ChoiceFinished(1, "stop"), TextDelta(0, "x"), ChoiceFinished(0, "length")]
    chunks = stream([*events, Finished(USAGE)], 2)
    finishes = [c["choices"][0]["index"] for c in chunks[-2:]]
    assert finishes == [1, 0]


def test_logprobs_in_chat_form() -> None:
    """Token, value, its bytes, and the best alternatives."""
    events = [TextDelta(0, "é", (LOGPROB,)), ChoiceFinished(0, "stop")]
    body = format_chat([*events, Finished(USAGE)], "m", 1)
    (token,) = body["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"]) == ("é", -0.5)
    assert token["bytes"] == [0xC3, 0xA9]
    assert [t["token"] for t in token["top_logprobs"]] == ["é", "e"]


def test_a_whole_answer_is_json() -> None:
    """The body of a non-stream response, complete."""
    body = json.loads(json.dumps(format_chat(EVENTS, "m", 1)))
    message = body["choices"][0]["message"]
    assert message["content"] == "Hello"
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert body["object"] == "chat.completion"


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": HELLO, **fields}, "req", "agent/1")


def test_everything_a_request_may_say() -> None:
    """All fields arrive where they belong."""
    request, how = chat(
        model="m", temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, n=2,
        repetition_penalty=1.1, repetition_context_size=64, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias={"5": -1}, stop=["a", "b"], max_tokens=9,
        logprobs=True, top_logprobs=3, stream=True, session_id="s",
        stream_options={"include_usage": True}, enable_thinking=False,
        chat_template_kwargs={"x": 1, "enable_thinking": True}, unknown_field=[1],
    )  # fmt: skip
    sampling, options = request.options.sampling, request.options
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 40, 7)
    assert sampling.logit_bias == ((5, -1.0),)
    assert (options.stop, options.n, options.max_tokens) == (("a", "b"), 2, 9)
    assert options.top_logprobs == 3
    assert request.thinking.enabled is False
    assert request.template_kwargs == {"x": 1}
    assert (request.client.session, request.client.user_agent) == ("s", "agent/1")
    assert (how.stream, how.include_usage, how.is_plugin) == (True, True, False)


def test_an_empty_request_leaves_everything_open() -> None:
    """null and absent fields are None: the model's and the user's defaults decide."""
    nothing = dict.fromkeys(("temperature", "max_tokens", "stop", "n", "logprobs"))
    request, how = chat(**nothing)
    assert request.options == chat()[0].options
    assert request.options.sampling.temperature is None
    assert request.options.top_logprobs is None
    assert how.stream is False


@pytest.mark.parametrize(
    ("fields", "top"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"top_logprobs": 2}, 2),
        ({"logprobs": False}, None),
    ],
)
def test_logprobs_are_asked_for(fields: Json, top: int | None) -> None:
    """A count alone asks, too."""
    assert chat(**fields)[0].options.top_logprobs == top


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"model": 3}, "model", 400),
        ({"temperature": "hot"}, "temperature", 400),
        ({"temperature": -1}, "temperature", 422),
        ({"temperature": True}, "temperature", 400),
        ({"top_p": 1.5}, "top_p", 422),
        ({"top_k": -2}, "top_k", 422),
        ({"min_p": 2}, "min_p", 422),
        ({"repetition_penalty": 0}, "repetition_penalty", 422),
        ({"repetition_context_size": 0}, "repetition_context_size", 422),
        ({"presence_penalty": []}, "presence_penalty", 400),
        ({"seed": 1.5}, "seed", 400),
        ({"seed": 1 << 65}, "seed", 422),
        ({"n": 0}, "n", 422),
        ({"n": 129}, "n", 422),
        ({"max_tokens": 0}, "max_tokens", 422),
        ({"max_completion_tokens": "9"}, "max_completion_tokens", 400),
        ({"stop": 3}, "stop", 400),
        ({"stop": ["a", 3]}, "stop[1]", 400),
        ({"stop": ["a"] * 65}, "stop", 422),
        ({"stop": ["a" * 1025]}, "stop[0]", 422),
        ({"logit_bias": {"x": 1}}, "logit_bias", 400),
        ({"logit_bias": {"-1": 1}}, "logit_bias", 400),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1", 400),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", 422),
        ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", 422),
        ({"logprobs": 1}, "logprobs", 400),
        ({"top_logprobs": 21}, "top_logprobs", 422),
        ({"stream": "yes"}, "stream", 400),
        ({"stream_options": []}, "stream_options", 400),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", 400),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", 400),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", 400),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", 400),
    ],
)
def test_bad_fields_are_named(fields: Json, param: str, status: int) -> None:
    """A wrong type is 400, a value out of range 422; param and message name it."""
    with pytest.raises(SidecarError) as caught:
        chat(**fields)
    error = caught.value
    assert (error.param, error.status_hint) == (param, status)
    assert param.split("[")[0].split(".")[0] in error.message
    assert isinstance(error, ValidationFailed if status == 422 else BadRequest)


def test_max_completion_tokens_beats_the_older_name() -> None:
    """Both given: the newer field counts."""
    assert chat(max_tokens=5, max_completion_tokens=7)[0].options.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"session_id": "a", "conversation_id": "b"}, "a"),
        ({"conversation_id": 5}, "5"),
        ({"metadata": {"thread_id": "c"}}, "c"),
        ({"extra_body": {"chat_id": "d"}}, "d"),
        ({"x_mlx": {"session": "e"}}, "e"),
        ({"session_id": {"odd": 1}, "x_mlx": {"session": "e"}}, "e"),
        ({"session_id": ""}, None),
        ({"session_id": False, "chat_id": True}, None),
    ],
)
def test_session_by_any_of_its_names(fields: Json, session: str | None) -> None:
    """The body's names, then metadata, extra_body, then the plugin's own."""
    assert chat(**fields)[0].client.session == session


def test_the_plugin_is_known_by_its_private_field() -> None:
    """It always gets usage, and says who the client was."""
    request, how = chat(x_mlx={"user_agent": "real/2"})
    assert (how.is_plugin, how.include_usage) == (True, True)
    assert request.client.user_agent == "real/2"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_of_a_raw_completion(prompt: Any, prompts: Any) -> None:
    """A text, several texts, token ids, several lists of ids."""
    request, _ = parse_completion({"prompt": prompt, "logprobs": 2}, "r", None)
    assert request.prompts == prompts
    assert request.options.top_logprobs == 2


@pytest.mark.parametrize(
    "prompt",
    [None, 3, [], {}, [[]], ["a", 1], [1, "a"], [True], [-1], [1 << 31], [[1], "a"]],
)
def test_a_bad_prompt_is_named(prompt: Any) -> None:
    """Anything else is a 400 on `prompt`, ids beyond 31 bits included."""
    with pytest.raises(BadRequest) as caught:
        parse_completion({"prompt": prompt}, "r", None)
    assert caught.value.param == "prompt"


@given(deltas.map(lambda d: [e for e in d if not isinstance(e, ReasoningDelta)]))
def test_a_completion_stream_joined_is_the_whole(said: list[Event]) -> None:
    """Legacy completions: the chunks' texts and logprobs add up to the body's."""
    finishes: list[Event] = [ChoiceFinished(0, "stop"), ChoiceFinished(1, "length")]
    events = [*said, *finishes, Finished(USAGE)]
    form = CompletionFormat("m", ["<", ""], include_usage=True)
    whole = form.whole(events)
    texts, tokens, reasons = ["", ""], [[], []], [None, None]
    for chunk in all_frames(form, events):
        for choice in chunk["choices"]:
            at = choice["index"]
            texts[at] += choice["text"]
            tokens[at] += (choice["logprobs"] or {"tokens": []})["tokens"]
            reasons[at] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert texts[0].startswith("<")
    assert reasons == ["stop", "length"]
    for at, choice in enumerate(whole["choices"]):
        assert tokens[at] == (choice["logprobs"] or {"tokens": []})["tokens"]


def test_calls_without_a_text_have_none() -> None:
    """null, as OpenAI has it: an empty text becomes an empty block in other formats."""
    call = ToolCall("call_1", "f", "{}")
    ended: list[Event] = [ChoiceFinished(0, "tool_calls"), Finished(USAGE)]
    alone = format_chat([*whole_call(0, 0, call), *ended], "m", 1)
    assert alone["choices"][0]["message"]["content"] is None
    beside = [TextDelta(0, "I read."), *whole_call(0, 0, call), *ended]
    assert format_chat(beside, "m", 1)["choices"][0]["message"]["content"] == "I read."
    nothing: list[Event] = [ChoiceFinished(0, "stop"), Finished(USAGE)]
    assert format_chat(nothing, "m", 1)["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(name: str) -> None:
    """As LM Studio has it; -2 is a mistake."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert parse_chat({**body, name: -1}, "r", None)[0].options.max_tokens is None
    with pytest.raises(ValidationFailed, match=f"^{name} must be 1"):
        parse_chat({**body, name: -2}, "r", None)


def _begun(last: dict[str, Any], **fields: Any) -> ChatRequest:
    talk = [*HELLO, {"role": "assistant", **last}]
    return parse_chat({"messages": talk, **fields}, "r", None)[0]


def test_a_last_answer_is_gone_on_with_where_that_is_asked_for() -> None:
    """As vLLM and as DeepSeek ask for it; else another answer begins behind it."""
    wanted = Message("assistant", ("a",))
    assert _begun({"content": "a"}, continue_final_message=True).begun == wanted
    both = {"continue_final_message": True, "add_generation_prompt": False}
    request = _begun({"content": "a"}, **both)
    assert (request.begun, request.ignored) == (wanted, ())
    request = _begun({"content": "a", "prefix": True})
    assert (request.begun, request.ignored) == (wanted, ())
    assert len(request.messages) == len(HELLO)
    assert _begun({"content": "a"}).begun is None
    assert _begun({"content": "a", "prefix": False}).begun is None


@pytest.mark.parametrize(
    ("last", "fields", "param"),
    [
        ({"content": ""}, {"continue_final_message": True}, "continue_final_message"),
        ({"content": "a", "role": "user"}, {"continue_final_message": True},
         "continue_final_message"),
        ({"content": "a", "prefix": True, "role": "user"}, {}, "messages[1].prefix"),
        ({"content": "a", "prefix": 1}, {}, "messages[1].prefix"),
        ({"content": "a"}, {"add_generation_prompt": False}, "add_generation_prompt"),
        ({"content": "a", "prefix": True}, {"guided_regex": "a+"}, "guided_regex"),
        ({"content": "a", "prefix": True},
         {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_gone_on_with_is_refused(
    last: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        _begun(last, **fields)
    assert caught.value.param == param


def test_only_the_last_message_is_gone_on_with() -> None:
    talk = [{"role": "assistant", "content": "a", "prefix": True}, *HELLO]
    with pytest.raises(BadRequest, match=r"messages\[0\].prefix"):
        parse_chat({"messages": talk}, "r", None)
