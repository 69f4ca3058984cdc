"""The Messages API: bodies in, messages and event streams out."""

import json
import random
from typing import Any

import pytest

from sidecar.core.errors import (
    BadRequest,
    ContextLengthExceeded,
    Unavailable,
    UnsupportedContent,
)
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    Idle,
    ReasoningDelta,
    ReasoningEnded,
    TextDelta,
    Usage,
)
from sidecar.core.requests import ChatRequest, Message, Thought, ToolCall
from sidecar.core.turn_token import make_token
from sidecar.dialects.anthropic_messages.answer import format_message
from sidecar.dialects.anthropic_messages.problem import problem
from sidecar.dialects.anthropic_messages.request import parse_messages
from sidecar.dialects.anthropic_messages.stream import MessageStream
from testkit.call_texts import whole_call

Json = dict[str, Any]
USAGE = Usage(100, 20, 64, 7)
CALL = ToolCall("call_1", "read", '{"path": "a"}')


def parse(body: Json, **headers: str) -> ChatRequest:
    """The request of a body with one user message, unless it has its own."""
    whole = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **body}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return parse_messages(whole, "r", named)


def events_of(data: bytes) -> list[tuple[str, Json]]:
    """Name and data of each event."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, text = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(text[6:])))
    return found


def stream(
    events: list[Event], *, shows_thinking: bool = True
) -> list[tuple[str, Json]]:
    """All events of a streamed answer."""
    encoder = MessageStream("m", shows_thinking=shows_thinking)
    data = encoder.started(Usage(100, 0, 64, 0))
    return events_of(data + b"".join(map(encoder.event, events)))


def joined(events: list[tuple[str, Json]]) -> Json:
    """The message that a client makes of a stream, as the SDKs do."""
    message: Json = {}
    texts = {"text_delta": "text", "thinking_delta": "thinking"}
    for name, data in events:
        if name == "message_start":
            message = data["message"]
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append({**data["content_block"], "json": ""})
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            if delta["type"] in texts:
                block[texts[delta["type"]]] += delta[texts[delta["type"]]]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                block["json"] += delta["partial_json"]
        elif name == "message_delta":
            message |= {**data["delta"], "usage": data["usage"]}
    for block in message["content"]:
        text = block.pop("json")
        if text:
            block["input"] = json.loads(text)
    return message


def test_a_conversation_keeps_its_order_and_its_parts() -> None:
    """System texts, mid-list system, results one by one, text beside calls."""
    request = parse(
        {
            "system": [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2",
                        "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "sig"},
                    {"type": "text", "text": "I read."},
                    {"type": "tool_use", "id": "c1", "name": "read", "input": {"p": 1}},
                    {"type": "redacted_thinking", "data": "x"}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
                     "content": [{"type": "text", "text": "gone"}]},
                    {"type": "text", "text": "and?"}]},
                {"role": "system", "content": "mid"},
            ],
        }
    )  # fmt: skip
    assert request.messages == (
        Message("system", ("S1", "S2")),
        Message("user", ("go",)),
        Message("assistant", ("I read.",), "hm",
                (ToolCall("c1", "read", '{"p": 1}'),), None,
                (Thought("hm", "sig"), Thought("", "x"))),
        Message("tool", ("one",), tool_call_id="c1"),
        Message("tool", ("[error]", "gone"), tool_call_id="c2"),
        Message("user", ("and?",)),
        Message("system", ("mid",)),
    )  # fmt: skip


def test_a_failed_result_that_says_so_itself_is_left_as_it_is() -> None:
    block = {"type": "tool_result", "tool_use_id": "c", "is_error": True,
             "content": "Error: no such file"}  # fmt: skip
    request = parse({"messages": [{"role": "user", "content": [block]}]})
    assert request.messages[0].parts == ("Error: no such file",)


def test_thinking_that_was_not_shown_comes_back_in_its_token() -> None:
    token = make_token("t", "hidden", with_text=True)
    block = {"type": "thinking", "thinking": "", "signature": token}
    turn = {"role": "assistant", "content": [block, {"type": "text", "text": "a"}]}
    request = parse({"messages": [turn, {"role": "user", "content": "b"}]})
    assert request.messages[0].reasoning == "hidden"


def test_one_answer_is_all_that_the_format_can_hold() -> None:
    """Two would be told as one, interleaved."""
    assert parse({"n": 2}).options.n == 1


def test_a_call_without_arguments_is_streamed_as_an_empty_object() -> None:
    """The SDKs parse what the deltas add up to."""
    call: list[Event] = whole_call(0, 0, ToolCall("c", "f", ""))
    deltas = [data["delta"] for name, data in stream(call) if "delta" in name]
    assert deltas == [{"type": "input_json_delta", "partial_json": "{}"}]


def test_a_message_without_content_is_an_empty_one() -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "user", "content": []}]
    assert parse({"messages": asked}).messages == (
        Message("user", ("a",)), Message("user"),
    )  # fmt: skip


def test_tools_and_the_choice_among_them() -> None:
    """A tool that Anthropic's servers run is left out, and named."""
    tools = [{"name": "read", "description": "d", "input_schema": {"type": "object"}},
             {"type": "web_search_20260101", "name": "web_search"}]  # fmt: skip
    request = parse({"tools": tools, "tool_choice": {"type": "tool", "name": "read"}})
    assert [tool.name for tool in request.tools] == ["read"]
    assert request.ignored == ("tools[web_search_20260101]",)
    assert (request.tool_choice.mode, request.tool_choice.name) == ("named", "read")
    assert parse({"tools": tools, "tool_choice": {"type": "any"}}).tool_choice.mode == (
        "required"
    )
    assert parse({"tool_choice": {"type": "none"}}).tool_choice.mode == "none"


def test_options_under_their_own_names() -> None:
    body = {"stop_sequences": ["X"], "temperature": 0.5, "top_k": 3, "top_p": 0.9}
    options = parse({**body, "max_tokens": 77}).options
    assert (options.stop, options.max_tokens) == (("X",), 77)
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)


@pytest.mark.parametrize(
    ("thinking", "on", "shown"),
    [
        ({"type": "adaptive", "display": "omitted"}, True, False),
        ({"type": "enabled", "budget_tokens": 2048}, True, True),
        ({"type": "disabled"}, False, True),
        (None, None, True),
    ],
)
def test_thinking_is_on_off_or_not_shown(
    thinking: Json | None, on: bool | None, shown: bool
) -> None:
    found = parse({"thinking": thinking}).thinking
    assert (found.enabled, found.is_shown) == (on, shown)


@pytest.mark.parametrize(
    "user_id",
    ["user_abc_account__session_0815", json.dumps({"session_id": "0815", "a": 1})],
)
def test_claude_codes_session_is_in_its_user_id(user_id: str) -> None:
    client = parse({"metadata": {"user_id": user_id}}).client
    assert (client.session, client.session_source) == ("0815", "metadata.user_id")


def test_or_in_its_header_and_none_at_all_is_none() -> None:
    client = parse({}, x_claude_code_session_id="s9").client
    assert client.session == "s9"
    assert client.session_source == "header x-claude-code-session-id"
    client = parse({"metadata": {"user_id": "somebody"}}).client
    assert (client.session, client.session_source) == (None, None)


def test_what_litellm_cut_comes_back_by_its_header() -> None:
    """The body's own fields count more; who asks is the plugin's word."""
    header = {"session": "s", "key": "k", "body": {"top_k": 5, "max_tokens": 1,
              "enable_thinking": False}}  # fmt: skip
    request = parse({"max_tokens": 30}, x_mlx=json.dumps(header))
    assert request.options.sampling.top_k == 5
    assert request.options.max_tokens == 30
    assert request.thinking.enabled is False
    assert (request.client.session, request.client.api_key_id) == ("s", "k")


def test_documents_as_text_and_blocks_unknown_here_as_what_they_say() -> None:
    blocks = [
        {"type": "document", "title": "T",
         "source": {"type": "text", "media_type": "text/plain", "data": "body"}},
        {"type": "search_result", "title": "found", "source": "https://a.b/c",
         "content": [{"type": "text", "text": "it"}]},
        {"type": "server_tool_use", "id": "s", "name": "search", "input": {"q": "é"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
            {"type": "web_search_result", "title": "A", "url": "u",
             "encrypted_content": "E"}]},
        {"type": "code_execution_tool_result", "tool_use_id": "s", "content":
            {"type": "code_execution_result", "stdout": "5", "return_code": 0}},
    ]  # fmt: skip
    request = parse({"messages": [{"role": "user", "content": blocks}]})
    assert request.messages[0].parts == (
        "T\nbody", "found\nhttps://a.b/c\nit",
        '{"name": "search", "input": {"q": "é"}}', "A\nu",
        '{"stdout": "5", "return_code": 0}',
    )  # fmt: skip


@pytest.mark.parametrize("is_list", [False, True])
def test_blocks_in_blocks_without_end_are_refused(is_list: bool) -> None:
    block: Json = {"type": "unknown"}
    for _ in range(330):
        block = {"type": "unknown", "content": [block] if is_list else block}
    with pytest.raises(BadRequest, match="levels deep"):
        parse({"messages": [{"role": "user", "content": [block]}]})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image", "source": {}}]}]}, "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "carrier"}}]}]}, "messages[0].content[0].source.type"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"tools": [{"type": "browser_toolset_20260801"}]}, "tools[0].type"),
        ({"output_config": {"effort": "immense"}}, "output_config.effort"),
        ({"system": 5}, "system"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_the_fields_name(body: Json, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(body)
    assert caught.value.param == field


ANSWER: list[Event] = [
    ReasoningDelta(0, "I "), Idle(), ReasoningDelta(0, "think."),
    ReasoningEnded(0, "token"), TextDelta(0, "Let "), TextDelta(0, "me."),
    *whole_call(0, 0, CALL), *whole_call(0, 1, ToolCall("call_2", "list", "")),
    ChoiceFinished(0, "tool_calls"), Finished(USAGE),
]  # fmt: skip


def test_a_whole_message() -> None:
    message = format_message(ANSWER, "m", shows_thinking=True)
    assert message["content"] == [
        {"type": "thinking", "thinking": "I think.", "signature": "token"},
        {"type": "text", "text": "Let me."},
        {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "a"}},
        {"type": "tool_use", "id": "call_2", "name": "list", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 36,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 64,
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 7},
    }


@pytest.mark.parametrize("shows_thinking", [True, False])
def test_a_stream_joined_is_the_whole(shows_thinking: bool) -> None:
    """However the text was cut; blocks one after the other, without gaps."""
    chance = random.Random(3)
    for _ in range(50):
        text = "".join(chance.choice("ab é\n") for _ in range(20))
        cuts = sorted(chance.sample(range(21), 4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 21], strict=True)]
        events: list[Event] = [
            ReasoningDelta(0, "t"), ReasoningEnded(0, "token"),
            *(TextDelta(0, piece) for piece in pieces), ReasoningDelta(0, "more"),
            ReasoningEnded(0, "token 2"), *whole_call(0, 0, CALL),
            ChoiceFinished(0, "tool_calls"), Finished(USAGE),
        ]  # fmt: skip
        found = joined(stream(events, shows_thinking=shows_thinking))
        whole = format_message(events, "m", shows_thinking=shows_thinking)
        assert {**found, "id": 0} == {**whole, "id": 0}


def test_the_order_of_events_and_the_usage_at_the_start() -> None:
    names = [name for name, _ in stream(ANSWER)]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    is_open = False
    for name in names[2:-2]:
        assert (name != "content_block_start") == is_open
        is_open = name != "content_block_stop"
    start = stream(ANSWER)[0][1]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (36, 64)


def test_thinking_that_is_not_shown_is_its_token_alone() -> None:
    events = stream(ANSWER, shows_thinking=False)
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "thinking_delta" not in {delta["type"] for delta in deltas}
    assert deltas[0] == {"type": "signature_delta", "signature": "token"}


def test_nothing_at_all_is_one_empty_text() -> None:
    nothing: list[Event] = [ChoiceFinished(0, "stop"), Finished(USAGE)]
    for message in (
        joined(stream(nothing)), format_message(nothing, "m", shows_thinking=True)
    ):  # fmt: skip
        assert message["content"] == [{"type": "text", "text": ""}]
        assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("finished", "wanted"),
    [
        (ChoiceFinished(0, "stop"), ("end_turn", None)),
        (ChoiceFinished(0, "stop", "X"), ("stop_sequence", "X")),
        (ChoiceFinished(0, "length"), ("max_tokens", None)),
        (ChoiceFinished(0, "tool_calls"), ("tool_use", None)),
    ],
)
def test_why_it_ended(finished: ChoiceFinished, wanted: tuple[str, str | None]) -> None:
    message = joined(stream([TextDelta(0, "a"), finished, Finished(USAGE)]))
    assert (message["stop_reason"], message["stop_sequence"]) == wanted


def test_a_broken_stream_says_so_and_never_stops_cleanly() -> None:
    encoder = MessageStream("m", shows_thinking=True)
    (name, data), = events_of(encoder.failed(Unavailable("gone")))  # fmt: skip
    assert name == "error"
    assert data["error"] == {"type": "overloaded_error", "message": "gone"}


def test_an_error_in_anthropics_form() -> None:
    body = problem(ContextLengthExceeded("5 tokens"), "r1")
    assert body["type"] == "error"
    assert body["request_id"] == "r1"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [("stop_sequences", 3, "stop_sequences"), ("stop_sequences", ["a", 3],
      "stop_sequences[1]"), ("stop", 3, "stop")],
)  # fmt: skip
def test_stops_are_refused_under_the_name_that_was_sent(
    name: str, value: Any, param: str
) -> None:
    """They are read as `stop`."""
    with pytest.raises(BadRequest) as said:
        parse({name: value})
    assert said.value.param == param
    assert str(said.value).startswith(f"{param} must be")


@pytest.mark.parametrize("kind", ["tool_addition", "tool_removal"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_tools_that_come_and_go_within_a_talk_are_refused(kind: str, role: str) -> None:
    """The model would be offered the same ones as before."""
    block = {"type": kind, "tool": {"type": "tool_definition", "name": "add"}}
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": role, "content": [block]},
        ],
    }
    with pytest.raises(UnsupportedContent, match=kind):
        parse_messages(body, "id", {})


def test_a_last_answer_is_begun() -> None:
    """The model goes on with it; it is no message of the conversation."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{"}]
    request = parse({"messages": talk, "thinking": {"type": "adaptive"}})
    assert request.begun == Message("assistant", ("{",))
    assert request.messages == (Message("user", ("hi",)),)
    assert request.ignored == ("thinking.type",)
    talk.append({"role": "user", "content": "go on"})
    assert parse({"messages": talk}).begun is None


def test_a_last_answer_without_text_is_closed_and_named() -> None:
    """The model begins another one."""
    used = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    for content in ([used], [{"type": "text", "text": "a"}, used], " "):
        talk = [{"role": "user", "content": "hi"}]
        talk.append({"role": "assistant", "content": content})  # type: ignore[dict-item]
        request = parse({"messages": talk})
        assert request.begun is None
        assert request.ignored == ("messages[1]",)


@pytest.mark.parametrize(
    ("more", "text", "param"),
    [
        ({}, "a ", "messages"),
        ({"output_format": {"type": "json_object"}}, "a", "output_format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "a",
         "output_config"),
        ({"tool_choice": {"type": "any"}}, "a", "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "look"}}, "a", "tool_choice"),
    ],
)  # fmt: skip
def test_what_a_begun_answer_cannot_be_is_refused(
    more: Json, text: str, param: str
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    with pytest.raises(BadRequest) as caught:
        parse({"messages": talk, "tools": tools, **more})
    assert caught.value.param == param


def test_an_answer_begins_behind_a_user() -> None:
    with pytest.raises(BadRequest, match="begin with a user"):
        parse({"messages": [{"role": "assistant", "content": "a"}]})


def test_effort_that_was_cut_beside_a_form_is_known() -> None:
    """LiteLLM sends the form on, and not the effort of models that it does not know."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    header = json.dumps({"body": {"output_config": {"effort": "low"}}})
    request = parse({"output_config": {"format": form}}, x_mlx=header)
    assert request.thinking.effort == "low"
    assert request.output_format is not None
    wrong = json.dumps({"body": {"output_config": {"effort": "banana"}}})
    with pytest.raises(BadRequest, match="effort"):
        parse({"output_config": {"format": form}}, x_mlx=wrong)
