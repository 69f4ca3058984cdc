"""What was cleared does not come back, whoever held it."""

import pytest

from testkit.chats import Chats, Said, assistant, system, user, words

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
        chats.memory.keep_past(prompt.promise)
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
