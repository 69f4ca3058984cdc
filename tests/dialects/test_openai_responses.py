"""The Responses API: items in, items and event streams out."""

import json
from typing import Any

import pytest

from sidecar.core.errors import (
    BadRequest,
    PayloadTooLarge,
    PreviousResponseNotFound,
    Unavailable,
)
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    ReasoningDelta,
    ReasoningEnded,
    TextDelta,
    ToolCallArguments,
    ToolCallStarted,
    Usage,
)
from sidecar.core.requests import ChatRequest, Message, Thought, ToolCall
from sidecar.core.turn_token import make_token
from sidecar.dialects.openai_responses.request import (
    Delivery,
    input_items,
    parse_responses,
    responses_body,
)
from sidecar.dialects.openai_responses.stream import ResponseStream, whole_response
from sidecar.service.stored_responses import StoredResponses
from testkit.call_texts import whole_call
from testkit.clock import Clock

Json = dict[str, Any]
USAGE = Usage(100, 20, 64, 7)
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "patch", "description": "p"}
SPACE = {"type": "namespace", "name": "agents", "tools": [{**READ, "name": "spawn"}]}


def parse(body: Json) -> tuple[ChatRequest, Delivery]:
    """A request, its input `hi` unless it has its own."""
    whole = {"model": "m", "input": "hi", **body}
    return parse_responses(whole, input_items(whole), "r", {})


def messages(*items: Json, **body: Any) -> tuple[Message, ...]:
    """What input items come to."""
    return parse({"input": list(items), **body})[0].messages


def test_a_string_and_instructions() -> None:
    request, _ = parse({"instructions": "S", "max_output_tokens": 7})
    assert request.messages == (Message("system", ("S",)), Message("user", ("hi",)))
    assert request.options.max_tokens == 7


@pytest.mark.parametrize(
    ("body", "headers", "source"),
    [({"client_metadata": {"session_id": "s"}}, {}, "client_metadata.session_id"),
     ({"prompt_cache_key": "c"}, {"session_id": "s"}, "header session_id"),
     ({"session_id": "s"}, {"session-id": "h"}, "body.session_id")],
)  # fmt: skip
def test_which_field_named_the_session(
    body: Json, headers: dict[str, str], source: str
) -> None:
    """Codex' header, never the key of its cache; the body's own id before both."""
    whole = {"model": "m", "input": "hi", **body}
    request, _ = parse_responses(whole, input_items(whole), "r", headers)
    assert request.client.session == "s"
    assert request.client.session_source == source


@pytest.mark.parametrize(
    ("metadata", "thread"),
    [
        ({"session_id": "s", "thread_id": "s"}, None),
        ({"session_id": "s", "thread_id": "t"}, "t"),
        ({"session_id": "s", "thread_id": 5}, None),
        ({"session_id": "s"}, None),
    ],
)
def test_a_sub_agent_of_codex_is_another_thread_of_its_session(
    metadata: Json, thread: str | None
) -> None:
    body = {"model": "m", "input": "hi", "client_metadata": metadata}
    request, _ = parse_responses(body, input_items(body), "r", {})
    assert (request.client.session, request.client.thread) == ("s", thread)


def test_a_limit_is_refused_under_the_name_that_was_sent() -> None:
    """It is read as max_tokens."""
    with pytest.raises(BadRequest, match="^max_output_tokens must be a whole") as said:
        parse({"max_output_tokens": "x"})
    assert said.value.param == "max_output_tokens"


def test_assistant_items_in_a_row_are_one_message() -> None:
    token = make_token("t", "hm")
    found = messages(
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text",
                                                         "text": "go"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": token,
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "I read."}]},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        {"type": "message", "role": "assistant", "content": "Done."},
    )  # fmt: skip
    assert found == (
        Message("system", ("D",)),
        Message("user", ("go",)),
        Message("assistant", ("I read.",), "hm", (ToolCall("c1", "read", "{}"),), None,
                (Thought("hm", token),)),
        Message("tool", ("one",), tool_call_id="c1"),
        Message("assistant", ("Done.",)),
    )  # fmt: skip


def test_parallel_calls_are_one_turn() -> None:
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "read",
              "arguments": "{}"} for n in (1, 2)]  # fmt: skip
    outputs = [{"type": "function_call_output", "call_id": f"c{n}", "output": "x"}
               for n in (1, 2)]  # fmt: skip
    found = messages({"role": "user", "content": "go"}, *calls, *outputs)
    assert [m.role for m in found] == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in found[1].tool_calls] == ["c1", "c2"]


def test_thinking_between_text_and_call_is_of_one_turn() -> None:
    """Only behind a call another turn begins."""
    thinking = {"type": "reasoning", "summary": [{"text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    found = messages(
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "a"},
        thinking, call, thinking, {"role": "assistant", "content": "b"},
    )  # fmt: skip
    assert [(m.text, len(m.tool_calls)) for m in found[1:]] == [("a", 1), ("b", 0)]


def test_a_summary_in_pieces_is_the_thinking_that_it_was() -> None:
    """Some clients make a part of each delta; the token tells what was said."""
    token = make_token("t", "a b\nc")
    parts = [{"type": "summary_text", "text": text} for text in ("a ", "b", "\nc")]
    item = {"type": "reasoning", "summary": parts, "encrypted_content": token}
    turn = {"role": "assistant", "content": "x"}
    found = messages(item, turn, {"role": "user", "content": "go"})
    assert found[0].reasoning == "a b\nc"


def test_tools_of_all_kinds() -> None:
    """Hosted ones are left out; a namespace's carry its name to the model."""
    hosted = {"type": "web_search"}
    request, delivery = parse({"tools": [READ, CUSTOM, SPACE, hosted]})
    assert [tool.name for tool in request.tools] == ["read", "patch", "agents__spawn"]
    assert request.ignored == ("tools[web_search]",)
    assert request.tools[1].parameters["required"] == ["input"]
    assert delivery.names["agents__spawn"].namespace == "agents"


def test_calls_of_all_kinds_come_back() -> None:
    found = messages(
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "é\n"},
        {"type": "function_call", "call_id": "c2", "name": "spawn",
         "namespace": "agents", "arguments": "{}"},
        tools=[CUSTOM, SPACE],
    )  # fmt: skip
    assert found[1].tool_calls == (
        ToolCall("c1", "patch", '{"input": "é\\n"}'),
        ToolCall("c2", "agents__spawn", "{}"),
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"), ({"input": 3}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].image_url"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]},
         "input[0].type"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "shell"}}, "tool_choice"),
        ({"reasoning": {"effort": "immense"}}, "reasoning.effort"),
        ({"tools": [READ], "tool_choice": {"type": "function", "name": "x"}},
         "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_the_fields_name(body: Json, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(body)
    assert caught.value.param == field


ANSWER: list[Event] = [
    ReasoningDelta(0, "I "), ReasoningDelta(0, "think."), ReasoningEnded(0, "token"),
    TextDelta(0, "Let "), TextDelta(0, "me."),
    *whole_call(0, 0, ToolCall("c1", "read", '{"a": 1}')),
    *whole_call(0, 1, ToolCall("c2", "patch", '{"input": "x"}')),
    *whole_call(0, 2, ToolCall("c3", "agents__spawn", "{}")),
    ChoiceFinished(0, "tool_calls"), Finished(USAGE),
]  # fmt: skip


def delivery(**body: Any) -> Delivery:
    """How an answer with these tools is told."""
    return parse({"tools": [READ, CUSTOM, SPACE], **body})[1]


def stream(events: list[Event], how: Delivery) -> list[Json]:
    """The data of all events of a streamed response."""
    encoder = ResponseStream(how, lambda response: None)
    data = encoder.started(USAGE) + b"".join(map(encoder.event, events))
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, text = block.split("\n")
        found.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_the_output_items() -> None:
    output = whole_response(ANSWER, delivery(), lambda response: None)["output"]
    assert [item["type"] for item in output] == [
        "reasoning", "message", "function_call", "custom_tool_call", "function_call",
    ]  # fmt: skip
    assert output[0]["summary"] == []
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert output[0]["encrypted_content"] == "token"
    assert output[1]["content"][0]["text"] == "Let me."
    assert output[2]["arguments"] == '{"a": 1}'
    assert output[3]["input"] == "x"
    assert (output[4]["namespace"], output[4]["name"]) == ("agents", "spawn")
    assert len({item["id"] for item in output}) == 5


@pytest.mark.parametrize("summary", [None, "auto"])
def test_a_stream_ends_with_what_its_items_were(summary: str | None) -> None:
    """Numbered without gaps; each item is done before the next begins."""
    events = stream(ANSWER, delivery(reasoning={"summary": summary}))
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done
    assert events[-1]["response"]["usage"]["input_tokens_details"] == {
        "cached_tokens": 64
    }
    is_open = False
    for event in events[2:-1]:
        is_added = event["type"] == "response.output_item.added"
        assert is_added != is_open
        is_open = event["type"] != "response.output_item.done"
    kind = "reasoning_summary_text" if summary else "reasoning_text"
    deltas = [e for e in events if e["type"] == f"response.{kind}.delta"]
    assert "".join(e["delta"] for e in deltas) == "I think."
    assert all(("summary_index" in e) == bool(summary) for e in deltas)


def test_each_part_is_added_before_its_first_piece() -> None:
    """OpenAI's JavaScript SDK drops a stream whose thinking has no part to go to."""
    parts: dict[tuple[str, int], str] = {}
    kinds = []
    for event in stream(ANSWER, delivery()):
        place = event.get("item_id", ""), event.get("content_index", 0)
        if event["type"] == "response.content_part.added":
            kinds.append(event["part"]["type"])
            parts[place] = event["part"]["text"]
        elif event["type"] in ("response.reasoning_text.delta",
                               "response.output_text.delta"):  # fmt: skip
            parts[place] += event["delta"]
        elif event["type"] == "response.content_part.done":
            assert parts.pop(place) == event["part"]["text"]
    assert {"reasoning_text", "output_text"} <= set(kinds)
    assert parts == {}


def test_a_call_in_which_the_model_ended_is_done_and_incomplete() -> None:
    """OpenAI's Python SDK completes no response with an item that is open."""
    half: list[Event] = [
        ToolCallStarted(0, 0, "call_1", "f"),
        ToolCallArguments(0, 0, '{"a": '),
        ChoiceFinished(0, "stop"),
        Finished(USAGE),
    ]
    *_, done, last = stream(half, delivery())
    assert done["type"] == "response.output_item.done"
    assert done["item"]["status"] == "incomplete"
    assert done["item"]["arguments"] == '{"a": '
    assert last["type"] == "response.completed"
    assert last["response"]["output"] == [done["item"]]


def test_a_cut_answer_is_incomplete_and_a_broken_one_failed() -> None:
    cut: list[Event] = [
        TextDelta(0, "a"), ChoiceFinished(0, "length"), Finished(USAGE)
    ]  # fmt: skip
    last = stream(cut, delivery())[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    encoder = ResponseStream(delivery(), lambda response: None)
    failed = encoder.failed(Unavailable("gone")).decode()
    assert "response.failed" in failed
    assert "gone" in failed


class TestStoredResponses:
    """What later requests may refer to."""

    def stored(self) -> tuple[StoredResponses, Json]:
        store = StoredResponses()
        how = delivery()
        whole = whole_response(ANSWER, how, lambda r: None)
        store.put("key", how.items, whole)
        return store, whole

    def test_a_previous_response_is_its_input_and_output(self) -> None:
        store, whole = self.stored()
        new = {"role": "user", "content": "and?"}
        found = store.resolve("key", whole["id"], [new])
        assert found == [*input_items({"input": "hi"}), *whole["output"], new]

    def test_an_item_is_found_by_its_id(self) -> None:
        store, whole = self.stored()
        item = whole["output"][1]
        reference = {"type": "item_reference", "id": item["id"]}
        assert store.resolve("key", None, [reference]) == [item]

    def test_a_reference_is_looked_up_once_however_often_it_is_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fifty thousand of them kept a core busy for a quarter of an hour."""
        store, whole = self.stored()
        looks: list[str] = []
        find = StoredResponses._item

        def item(own: StoredResponses, key_id: str | None, name: str) -> object:
            looks.append(name)
            return find(own, key_id, name)

        monkeypatch.setattr(StoredResponses, "_item", item)
        reference = {"type": "item_reference", "id": whole["output"][1]["id"]}
        found = store.resolve("key", None, [reference] * 5000)
        assert (len(found), len(looks)) == (5000, 1)

    def test_what_references_stand_for_is_bounded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As if it had been sent: 4 MB of them became 3.7 GB."""
        store, whole = self.stored()
        monkeypatch.setattr("sidecar.service.stored_responses._MAX_BYTES", 1 << 20)
        item = whole["output"][1]
        reference = {"type": "item_reference", "id": item["id"]}
        size = len(json.dumps(item, separators=(",", ":")).encode())
        maximum = (1 << 20) // size
        assert (
            len(store.resolve("key", None, [reference] * (maximum // 2)))
            == maximum // 2
        )
        with pytest.raises(PayloadTooLarge, match="item_references"):
            store.resolve("key", None, [reference] * (maximum * 2))

    @pytest.mark.parametrize("previous", ["resp_x", 7])
    def test_what_is_not_kept_is_refused(self, previous: object) -> None:
        store, _ = self.stored()
        with pytest.raises(PreviousResponseNotFound, match="send the items"):
            store.resolve("key", previous, [])
        with pytest.raises(PreviousResponseNotFound):
            store.resolve("key", None, [{"type": "item_reference", "id": "x"}])

    def test_another_key_has_none_of_it(self) -> None:
        store, whole = self.stored()
        with pytest.raises(PreviousResponseNotFound):
            store.resolve("other", whole["id"], [])
        item = {"type": "item_reference", "id": whole["output"][0]["id"]}
        with pytest.raises(PreviousResponseNotFound):
            store.resolve("other", None, [item])

    def test_an_hour_later_it_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, whole = self.stored()
        Clock(monkeypatch, "sidecar.service.stored_responses").advance(3601)
        with pytest.raises(PreviousResponseNotFound):
            store.resolve("key", whole["id"], [])

    def test_clearing_leaves_nothing(self) -> None:
        store, whole = self.stored()
        store.forget()
        with pytest.raises(PreviousResponseNotFound):
            store.resolve("key", whole["id"], [])

    def test_deleted_is_gone(self) -> None:
        store, whole = self.stored()
        assert store.get("key", whole["id"]) == whole
        store.delete("key", whole["id"])
        with pytest.raises(PreviousResponseNotFound):
            store.resolve("key", whole["id"], [])

    def test_no_key_pushes_out_what_another_has_stored(self) -> None:
        store, whole = self.stored()
        for _ in range(300):
            other = whole_response(ANSWER[-2:], delivery(), lambda r: None)
            store.put("another key", [], other)
        assert store.get("key", whole["id"]) == whole
        item = {"type": "item_reference", "id": whole["output"][0]["id"]}
        assert store.resolve("key", None, [item]) == [whole["output"][0]]

    def test_beyond_the_bytes_who_holds_max_loses(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, whole = self.stored()
        monkeypatch.setattr("sidecar.service.stored_responses._MAX_BYTES", 200_000)
        for _ in range(30):
            other = whole_response(ANSWER[-2:], delivery(), lambda r: None)
            store.put("another key", ["x" * 20_000], other)
        assert store.get("key", whole["id"]) == whole
        held = [known.responses.weight for known in store._of_keys.values()]
        assert 100_000 < sum(held) <= 200_000

    def test_at_max_256_are_kept(self) -> None:
        store = StoredResponses()
        ids = []
        for _ in range(257):
            how = delivery()
            whole = whole_response(ANSWER[-2:], how, lambda r: None)
            store.put("key", how.items, whole)
            ids.append(whole["id"])
        with pytest.raises(PreviousResponseNotFound):
            store.resolve("key", ids[0], [])
        assert store.resolve("key", ids[1], [])


def test_a_body_that_could_not_be_sent_back_is_refused_at_once() -> None:
    """Not after the whole answer was generated."""
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    with pytest.raises(BadRequest, match="nested too deeply"):
        responses_body({"input": "hi", "metadata": deep}, {})
