"""The sidecar's stream to LiteLLM's chunks, in the only order LiteLLM keeps."""

import json
from typing import Any

import litellm
import pytest
from litellm.types.utils import ModelResponseStream

from litellm_mlx.chunks import ChunkParser, Item
from tests.litellm_mlx.provider_calls import call_with, proxied
from tests.litellm_mlx.sidecar_answers import (
    DONE,
    USAGE,
    chunk,
    rich_answer,
    tool_delta,
)


def parse(steps: list[Any], *, can_take_empty: bool = True) -> list[Item]:
    """Run the steps of a script through the parser in one piece."""
    parser = ChunkParser(call_with({}, {} if can_take_empty else proxied("/x", {})))
    raw = [
        step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode()
        for step in steps
    ]
    items = parser.feed(b"".join(raw))
    ended = bool(items) and not isinstance(items[-1], ModelResponseStream)
    return items if ended else items + parser.end()


def summary(items: list[Item]) -> list[str]:
    """One short word for each item."""
    words = []
    for item in items:
        if not isinstance(item, ModelResponseStream):
            words.append(type(item).__name__ if item else "end")
            continue
        for choice in item.choices:
            found = [name for name in FIELDS if getattr(choice.delta, name, None)]
            word = "+".join(found) or choice.finish_reason or "empty"
            words.append(word + str(choice.index or ""))
        if getattr(item, "usage", None):
            words.append("usage")
    return words


FIELDS = ("role", "reasoning_content", "content", "tool_calls")
ROLE = chunk("m", {"role": "assistant", "content": ""})
TEXT = chunk("m", {"content": "a"})
STOP = chunk("m", {}, "stop")
USED = chunk("m", None, usage=USAGE)


class TestChunks:
    @pytest.mark.parametrize(
        "steps",
        [
            [ROLE, TEXT, STOP, USED, DONE],
            [ROLE, TEXT, USED, STOP, DONE],
            [ROLE, TEXT, {**STOP, "usage": USAGE}, DONE],
            [ROLE, {**TEXT, "usage": USAGE}, STOP, DONE],
            [ROLE, chunk("m", {"content": "a"}, "stop", usage=USAGE), DONE],
            [ROLE, TEXT, STOP, USED],
        ],
        ids=["openai", "ours", "on finish", "on text", "all in one", "no DONE"],
    )
    def test_order_is_deltas_usage_finish(self, steps: list[Any]) -> None:
        """LiteLLM throws usage away if it comes with or after the finish."""
        expected = ["role", "content", "empty", "usage", "stop", "end"]
        assert summary(parse(steps)) == expected

    def test_reasoning_on_the_finish_chunk_survives(self) -> None:
        """LiteLLM would drop it there."""
        steps = [ROLE, chunk("m", {"reasoning_content": "r"}, "length"), DONE]
        expected = ["role", "reasoning_content", "length", "end"]
        assert summary(parse(steps)) == expected

    def test_everything_of_a_rich_answer(self) -> None:
        """Reasoning, text and both calls with their ids come through."""
        items = parse(rich_answer())
        deltas = [item.choices[0].delta for item in items[:-1]]  # type: ignore[union-attr]
        assert "".join(d.get("reasoning_content") or "" for d in deltas) == (
            "Let me think."
        )
        assert "".join(d.content or "" for d in deltas) == "I will look."
        calls = [c for d in deltas for c in d.tool_calls or []]
        assert [(c.id, c.function.name, c.index) for c in calls] == [
            ("call_a", "get_weather", 0),
            ("call_b", "get_time", 1),
        ]

    def test_one_id_for_all_chunks(self) -> None:
        """Chunks without an id get the call's."""
        steps = [{k: v for k, v in s.items() if k != "id"} for s in (ROLE, TEXT, STOP)]
        ids = {item.id for item in parse([*steps, DONE])[:-1]}  # type: ignore[union-attr]
        assert len(ids) == 1
        assert ids.pop().startswith("chatcmpl-call-")

    def test_empty_deltas_are_kept_only_where_they_stay_empty(self) -> None:
        """On /v1/messages LiteLLM would open an empty text block for each."""
        steps = [ROLE, chunk("m", {}), TEXT, chunk("m", {"content": ""}), STOP, DONE]
        kept = summary(parse(steps))
        assert kept == ["role", "empty", "content", "empty", "stop", "end"]
        client = proxied("/v1/messages", {"a": 1})
        parser = ChunkParser(call_with({}, client))
        raw = [f"data: {json.dumps(s)}\n\n".encode() for s in steps[:-1]]
        words = summary(parser.feed(b"".join(raw) + DONE))
        assert words == ["role", "content", "stop", "end"]

    def test_each_choice_keeps_its_finish(self) -> None:
        """With n=2 all finishes are held until the usage is through."""
        steps = [
            chunk("m", {"content": "a"}),
            chunk("m", {"content": "b"}, index=1),
            chunk("m", {}, "stop"),
            chunk("m", {"content": "c"}, index=1),
            chunk("m", {}, "length", index=1),
            USED,
            DONE,
        ]
        expected = ["content", "content1", "content1", "empty", "usage"]
        expected += ["empty", "length1", "stop", "end"]
        assert summary(parse(steps)) == expected

    @pytest.mark.parametrize(
        "steps",
        [
            [ROLE, TEXT],
            [ROLE, TEXT, USED, DONE],
            [],
            [chunk("m", {}, "stop"), chunk("m", {"content": "b"}, index=1), DONE],
        ],
        ids=["cut", "DONE alone", "nothing", "one of two choices"],
    )
    def test_a_missing_finish_is_an_error(self, steps: list[Any]) -> None:
        """LiteLLM would say "stop"."""
        error = parse(steps)[-1]
        assert isinstance(error, litellm.InternalServerError)
        assert "without a finish_reason" in str(error)

    def test_an_error_frame_comes_after_what_was_said_before(self) -> None:
        """Text in the same piece is not lost, and nothing follows the error."""
        frame = {"error": {"message": "out of memory", "code": "generation_error"}}
        items = parse([ROLE, TEXT, frame, STOP, DONE])
        assert summary(items) == ["role", "content", "InternalServerError"]
        assert "out of memory" in str(items[-1])

    @pytest.mark.parametrize("bad", [b"data: {broken\n\n", b"data: [1]\n\n"])
    def test_an_unreadable_chunk_is_an_error(self, bad: bytes) -> None:
        """And the call still has to be cancelled."""
        parser = ChunkParser(call_with())
        assert summary(parser.feed(bad)) == ["InternalServerError"]
        assert not parser.is_over

    def test_tool_calls_may_be_cut_anywhere(self) -> None:
        """One byte at a time the chunks are the same."""
        steps = [ROLE, chunk("m", tool_delta(0, "c", "f", "{}")), STOP]
        raw = b"".join(f"data: {json.dumps(s)}\r\n\r\n".encode() for s in steps) + DONE
        parser = ChunkParser(call_with())
        items = [item for i in range(len(raw)) for item in parser.feed(raw[i : i + 1])]
        assert summary(items) == ["role", "tool_calls", "stop", "end"]
