"""What the model reads of an echoed turn, by what came with its thinking."""

from dataclasses import replace

import pytest

from sidecar.core.requests import Message, Thought
from sidecar.core.turn_token import make_token
from testkit.chats import Chats, Client, Said, Turn, system, user, words

SAID = Said("It is done.", "I think it over.")


def asked() -> list[Message]:
    return [system(words(80)), user("go")]


def echo(turn: Turn, thought: Thought, text: str = SAID.text) -> list[Message]:
    """The conversation with the turn echoed, in a context that has changed since."""
    shown = Message("assistant", (text,), thought.text or None, thoughts=(thought,))
    return [system(words(80)), user("go, please"), shown, user("and?")]


@pytest.fixture
def chats() -> Chats:
    return Chats()


@pytest.fixture
def turn(chats: Chats) -> Turn:
    return chats.turn(asked(), SAID)


@pytest.mark.parametrize("text", [SAID.reasoning, "", f"\n{SAID.reasoning}\n"])
def test_our_token_and_the_text_equal_or_empty_is_that_turn(
    chats: Chats, turn: Turn, text: str
) -> None:
    """Whatever became of the messages before it: its own ids stand there."""
    thought = Thought(text, make_token(turn.issued, SAID.reasoning))
    prompt = chats.ask(echo(turn, thought))
    assert prompt.report.num_spliced == 1
    assert SAID.reasoning in prompt.text


def test_our_token_with_another_thinking_is_the_clients_text(
    chats: Chats, turn: Turn
) -> None:
    thought = Thought("I was edited.", make_token(turn.issued, SAID.reasoning))
    prompt = chats.ask(echo(turn, thought))
    assert prompt.report.num_spliced == 0
    assert "I was edited." in prompt.text
    assert SAID.reasoning not in prompt.text


def test_our_token_with_another_answer_is_the_clients_text(
    chats: Chats, turn: Turn
) -> None:
    thought = Thought(SAID.reasoning, make_token(turn.issued, SAID.reasoning))
    prompt = chats.ask(echo(turn, thought, "It is not done."))
    assert prompt.report.num_spliced == 0
    assert "It is not done." in prompt.text


def test_the_token_of_another_keys_turn_is_worth_nothing(
    chats: Chats, turn: Turn
) -> None:
    thought = Thought("", make_token(turn.issued, SAID.reasoning))
    prompt = chats.ask(echo(turn, thought), Client(key="other"))
    assert prompt.report.num_spliced == 0
    assert SAID.reasoning not in prompt.text


@pytest.mark.parametrize("token", [None, "foreign"])
def test_without_a_token_of_ours_it_is_the_clients_text(
    chats: Chats, turn: Turn, token: str | None
) -> None:
    """A cloud model's turn, or one written by hand."""
    prompt = chats.ask(echo(turn, Thought("Somebody else thought.", token)))
    assert prompt.report.num_spliced == 0
    assert "Somebody else thought." in prompt.text


@pytest.mark.parametrize("more", [Thought("EXTRA"), Thought("EXTRA", "foreign")])
def test_thinking_put_beside_ours_is_read(
    chats: Chats, turn: Turn, more: Thought
) -> None:
    """The turn is not what it was: all of it is the client's text."""
    mine = Thought(SAID.reasoning, make_token(turn.issued, SAID.reasoning))
    messages = echo(turn, mine)
    both = f"{SAID.reasoning}\n{more.text}"
    messages[2] = replace(messages[2], thoughts=(mine, more), reasoning=both)
    prompt = chats.ask(messages)
    assert prompt.report.num_spliced == 0
    assert "EXTRA" in prompt.text


def test_a_foreign_token_without_text_is_no_turn_of_ours(
    chats: Chats, turn: Turn
) -> None:
    """A cloud model's answer that happens to say the same."""
    shown = Message("assistant", (SAID.text,), None, thoughts=(Thought("", "cloud"),))
    prompt = chats.ask([*asked(), shown, user("and?")])
    assert prompt.report.num_spliced == 0
    assert SAID.reasoning not in prompt.text


def test_thinking_between_two_texts_is_known_again(chats: Chats) -> None:
    """The parts come back as blocks; what was said is their texts, joined."""
    raw = "<think>TA</think>mid <think>TB</think> end"
    prompt = chats.ask(asked())
    said = Said("mid end", "TATB")
    chats.answer(prompt, said, raw=raw)
    thoughts = tuple(
        Thought(t, make_token(prompt.pending_turn.turn, t)) for t in ("TA", "TB")
    )
    shown = Message("assistant", ("mid", " end"), "TA\nTB", thoughts=thoughts)
    found = chats.ask([*asked(), shown, user("and?")])
    assert found.report.num_spliced == 1
    assert raw in found.text


def test_a_turn_that_is_gone_is_read_as_its_text(turn: Turn) -> None:
    """After a restart: the token still says that nothing was edited, and no more."""
    fresh = Chats()
    thought = Thought(SAID.reasoning, make_token(turn.issued, SAID.reasoning))
    prompt = fresh.ask(echo(turn, thought))
    assert prompt.report.num_spliced == 0
    assert SAID.reasoning in prompt.text


def test_two_turns_tokens_in_one_message_name_no_turn(chats: Chats, turn: Turn) -> None:
    other = chats.turn([system(words(80)), user("else")], SAID)
    thoughts = [
        Thought("", make_token(t.issued, SAID.reasoning)) for t in (turn, other)
    ]
    messages = echo(turn, thoughts[0])
    messages[2] = replace(messages[2], thoughts=tuple(thoughts))
    assert chats.ask(messages).report.num_spliced == 0
