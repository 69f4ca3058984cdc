"""Engine events of one choice -> what the client is told."""

import json
import random
from dataclasses import replace

import pytest

from sidecar.core.errors import AnswerInvalid
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallEnded,
)
from sidecar.core.requests import Tool
from sidecar.engine.job import ChoiceEnded, Token
from sidecar.output.calls.call_sink import ToolSyntax
from sidecar.output.output_syntax import Markers, StartMode
from sidecar.output.reasoning_splitter import StreamSplitter
from sidecar.service.choice import ChatChoice, PlainChoice
from testkit.call_texts import FORMATS

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SYNTAX = ToolSyntax("<tool_call>", "</tool_call>", tuple(FORMATS.values()))
TOOLS = (Tool("f", {}, {}),)


def chat_choice(mode: StartMode = "off") -> ChatChoice:
    splitter = StreamSplitter(Markers(), mode, [SYNTAX], TOOLS)
    return ChatChoice(2, splitter, lambda thinking: f"of {thinking}")


def tell(
    choice: ChatChoice | PlainChoice, pieces: list[str], reason: str = "stop"
) -> list[Event]:
    """Events of a generation whose tokens are `pieces`, with a logprob each."""
    events: list[Event] = []
    for number, piece in enumerate(pieces):
        events += choice.feed(Token(2, piece, TokenLogprob(piece, number, -1.0)))
    ended = ChoiceEnded(2, "", reason, None, tuple(range(len(pieces))))  # type: ignore[arg-type]
    *rest, finished = choice.end(ended)
    assert isinstance(finished, ChoiceFinished)
    assert finished.token_ids == ended.token_ids
    return [*events, *rest, replace(finished, token_ids=())]


def test_a_call_that_must_come_and_cannot_be_read_is_an_error() -> None:
    """Not an answer of prose; one that was cut is what it is."""

    def answer(text: str, reason: str = "stop") -> list[Event]:
        splitter = StreamSplitter(Markers(), "off", [SYNTAX], TOOLS)
        choice = ChatChoice(2, splitter, lambda thinking: "", must_call=True)
        return tell(choice, [text], reason)

    assert calls(answer(CALL))
    assert content(answer("<tool_call>{", "length"))
    for odd in ("<tool_call>[1]</tool_call>", '<tool_call>{"name": "f", "arg', "no"):
        with pytest.raises(AnswerInvalid, match="cannot be read"):
            answer(odd)


def content(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def reasoning(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ReasoningDelta))


def calls(events: list[Event]) -> list[ToolCallEnded]:
    return [e for e in events if isinstance(e, ToolCallEnded)]


def cut(text: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    places = sorted(chance.randrange(len(text) + 1) for _ in range(9))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_text_around_calls_becomes_trailing_content(seed: int) -> None:
    """Row 18 of the splitter's table: `t`, then `\\ntail` at the end, then the call."""
    events = tell(chat_choice(), cut(f"t {CALL} tail", seed))
    assert content(events) == "t\ntail"
    (call,) = calls(events)
    assert (call.choice, call.index, call.call.name) == (2, 0, "f")
    assert json.loads(call.call.arguments) == {"a": 1}
    assert events[-1] == ChoiceFinished(2, "tool_calls")


def test_trailing_content_without_any_before_begins_at_once() -> None:
    """No newline in front of an answer that begins with the tail."""
    assert content(tell(chat_choice(), [f"{CALL}tail"])) == "tail"


def test_what_is_no_call_is_content() -> None:
    """Markup that parses to nothing is told as the model wrote it; reason stop."""
    events = tell(chat_choice(), ["see <tool_call>", "nothing</tool_call>"])
    assert content(events) == "see <tool_call>nothing</tool_call>"
    assert calls(events) == []
    assert events[-1] == ChoiceFinished(2, "stop")


def test_a_call_cut_by_the_limit_is_content() -> None:
    """If nothing of it was shown; else it never ends. The reason stays length."""
    for size, shown in ((30, "<tool_call>"), (44, "")):
        events = tell(chat_choice(), [CALL[:size]], "length")
        assert calls(events) == []
        assert content(events).startswith(shown)
        assert events[-1] == ChoiceFinished(2, "length")


def test_a_call_that_is_cut_behind_a_whole_one_is_told_by_the_reason() -> None:
    """The client would take what it has for all; the markup is no text for anyone."""
    events = tell(chat_choice(), ["Ok.", CALL, '<tool_call>{"name": "f"'], "length")
    assert len(calls(events)) == 1
    assert content(events) == "Ok."
    assert events[-1] == ChoiceFinished(2, "length")
    assert tell(chat_choice(), [CALL], "length")[-1] == ChoiceFinished(2, "tool_calls")


def test_several_calls_are_numbered() -> None:
    """index counts from 0 within the choice."""
    numbers = [call.index for call in calls(tell(chat_choice(), [CALL, CALL, CALL]))]
    assert numbers == [0, 1, 2]


def test_a_complete_call_in_unclosed_reasoning_counts() -> None:
    """A model that forgets </think> before its call has still called."""
    events = tell(chat_choice("on"), ["thinking", CALL])
    assert reasoning(events) == "thinking"
    assert len(calls(events)) == 1


@pytest.mark.parametrize("tail", [" end ", ""])
@pytest.mark.parametrize("seed", range(30))
def test_every_logprob_is_told_once_and_in_order(seed: int, tail: str) -> None:
    """Held text delays its logprobs; none is lost, even if the call is the end."""
    pieces = cut(f"<think>hm</think> so {CALL}{tail}", seed)
    events = tell(chat_choice("undecided"), pieces)
    told = [
        logprob.token_id
        for event in events
        if isinstance(event, (TextDelta, ReasoningDelta))
        for logprob in event.logprobs
    ]
    assert told == list(range(len(pieces)))


def test_reasoning_tokens_are_counted() -> None:
    """Tags included: <think>, two tokens, </think>; not the answer's."""
    choice = chat_choice("undecided")
    tell(choice, ["<think>", "a", "b", "</think>", "answer", "!"])
    assert choice.num_reasoning == 4


def test_a_raw_completion_tells_text_as_it_is() -> None:
    """Tags are text; logprobs ride along; nothing is held but what was not decoded."""
    events = tell(PlainChoice(2), ["<think>", "", " é", CALL])
    assert content(events) == f"<think> é{CALL}"
    told = [
        lp.token_id for e in events if isinstance(e, TextDelta) for lp in e.logprobs
    ]
    assert told == [0, 1, 2, 3]
    assert events[-1] == ChoiceFinished(2, "stop")


def test_a_stop_string_cuts_as_the_limit_does() -> None:
    """Thinking that quotes a call had not ended, and half a call is none."""
    for mode, text in (
        ("on", f"The page says {CALL}"),
        ("off", '<tool_call>{"name": "f", "arguments": {"a": "x'),
    ):
        choice = chat_choice(mode)  # type: ignore[arg-type]
        events = choice.feed(Token(2, text, None))
        events += choice.end(ChoiceEnded(2, "", "stop", "\n", (1,)))
        assert calls(events) == []
        assert events[-1] == ChoiceFinished(2, "stop", "\n", (1,))


def test_a_call_that_is_not_sent_is_told() -> None:
    """What its client has not seen is not put back into the next prompt."""
    splitter = StreamSplitter(Markers(), "off", [SYNTAX], TOOLS)
    choice = ChatChoice(2, splitter, lambda thinking: "", is_single=True)
    events = tell(choice, [CALL, "\n", CALL.replace("1", "2")])
    assert len(calls(events)) == 1
    assert not choice.is_all_shown
    alone = ChatChoice(
        2, StreamSplitter(Markers(), "off", [SYNTAX], TOOLS), str, is_single=True
    )
    assert len(calls(tell(alone, [CALL]))) == 1
    assert alone.is_all_shown
