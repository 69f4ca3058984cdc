"""What was cleared does not come back, whoever held it."""

from threading import Event, Thread
from typing import Any

import pytest

from sidecar.memory import conversation_memory
from testkit.chats import Chats, Client, Said, assistant, system, user, words
from testkit.volatile import clock

THOUGHT = "the user's secret is forty-two"
PAST = [system(words(60)), user("What is my secret?")]
SAID = Said("I will not say.", THOUGHT)
NEXT = [*PAST, assistant(SAID.text), user("And now?")]


def test_a_cleared_thought_is_not_spliced() -> None:
    """Nor a call's arguments, nor a value, nor a thread."""
    chats = Chats()
    chats.turn(PAST, SAID)
    assert THOUGHT in chats.ask(NEXT).text
    chats.memory.forget()
    prompt = chats.ask(NEXT)
    assert THOUGHT not in prompt.text
    assert prompt.report.is_new
    assert prompt.report.num_spliced == 0


@pytest.mark.parametrize("broken_off", [False, True])
def test_what_runs_while_all_is_cleared_brings_nothing_back(broken_off: bool) -> None:
    """It was begun with what is forgotten since, and ends without a trace."""
    chats = Chats()
    prompt = chats.ask(PAST)
    chats.memory.forget()
    if broken_off:
        chats.memory.keep_past(prompt.pending_turn)
    else:
        chats.answer(prompt, SAID)
    assert len(chats.memory.lineage) == 0
    assert THOUGHT not in chats.ask(NEXT).text


def test_the_drift_report_is_cleared() -> None:
    """It quotes prompts."""
    chats = Chats()
    chats.turn(PAST, SAID)
    other = chats.ask([system(words(60)), user("Who knows it?")])
    assert other.report.divergence is not None
    chats.pipeline.note_cost(other, 10)
    assert chats.pipeline.drift.rows()
    chats.memory.forget()
    assert chats.pipeline.drift.rows() == []


def test_no_text_is_left_in_memory() -> None:
    """Ids of long texts are remembered under the texts."""
    chats = Chats()
    chats.turn(PAST, SAID)
    known = chats.pipeline.encoder.num_remembered
    chats.memory.forget()
    assert known > chats.pipeline.encoder.num_remembered == 0


def test_a_clearing_that_falls_into_a_prepare_lends_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read before is not remembered as if it had been read behind."""
    chats = Chats()
    chats.turn([clock("10:05", 200), *PAST[1:]], SAID)
    lay_out = chats.pipeline._lay_out

    def cleared(*arguments: Any) -> Any:
        chats.memory.forget()
        return lay_out(*arguments)

    monkeypatch.setattr(chats.pipeline, "_lay_out", cleared)
    prompt = chats.prepare([clock("10:07", 200), *PAST[1:]], Client())
    monkeypatch.undo()
    chats.answer(prompt, SAID)
    chats.memory.keep_past(prompt.pending_turn)
    chats.pipeline.note_cost(prompt, 10)
    assert not chats.memory.is_current(prompt.pending_turn)
    assert len(chats.memory.lineage) == 0
    assert chats.memory.turns.num_threads == 0
    assert chats.pipeline.drift.rows() == []


@pytest.mark.parametrize("how", ["commit", "keep_past"])
def test_a_clearing_waits_for_what_is_being_kept(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before all of it or behind all of it: nothing is left of either."""
    chats = Chats()
    prompt = chats.ask(PAST)
    add, begun, cleared = chats.memory.lineage.add, Event(), Event()

    def slowly(record: Any) -> None:
        begun.set()
        cleared.wait(0.5)
        add(record)

    monkeypatch.setattr(chats.memory.lineage, "add", slowly)
    said = conversation_memory.AssistantOutput(SAID.text, SAID.reasoning, (), (1, 2))
    keep = {
        "commit": lambda: chats.memory.commit(prompt.pending_turn, said),
        "keep_past": lambda: chats.memory.keep_past(prompt.pending_turn),
    }
    keeping = Thread(target=keep[how])
    keeping.start()
    assert begun.wait(30)
    chats.memory.forget()
    cleared.set()
    keeping.join(30)
    assert len(chats.memory.lineage) == 0
    assert chats.memory.turns.num_threads == 0


def test_a_cost_that_is_told_late_is_not_noted() -> None:
    """The drift report quotes prompts."""
    chats = Chats()
    chats.turn(PAST, SAID)
    other = chats.ask([system(words(60)), user("Who knows it?")])
    assert other.report.divergence is not None
    chats.memory.forget()
    chats.pipeline.note_cost(other, 10)
    assert chats.pipeline.drift.rows() == []
