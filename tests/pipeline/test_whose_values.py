"""Chats without a session id: equal first words prove nothing about who asks."""

import json

import pytest

from sidecar.core.requests import Message, ToolCall
from testkit.chats import (
    Chats,
    Client,
    Said,
    assistant,
    result,
    system,
    tool,
    user,
    words,
)

NOBODY = Client(session=None)
ORDERS = words(200)


def inbound(name: str) -> str:
    return (
        "## Inbound Context (trusted metadata)\n```json\n"
        f'{{"name": "{name}", "role": "of {name}"}}\n```\n\n# Project Context\n'
    )


def told(name: str, clock: str = "10:05") -> Message:
    """A system message with a person's context and a clock."""
    return system(f"Current time: {clock}\n{ORDERS}\n{inbound(name)}{words(200, 1)}")


def sender(name: str, text: str) -> Message:
    """A user's message as OpenClaw sends the newest one."""
    info = f'Sender (untrusted metadata):\n```json\n{{"label": "{name}"}}\n```\n\n'
    return user(info + text)


PLAIN = system(f"{ORDERS}\nCurrent time: 10:05\n{words(200, 1)}")
LATER = system(f"{ORDERS}\nCurrent time: 10:06\n{words(200, 1)}")


def test_the_first_words_of_two_people_share_no_context() -> None:
    """A13: each reads its own sender; only the clock is kept, and said anew."""
    chats = Chats()
    chats.turn([told("Alice"), user("hi")], Said("Hello!", "Alice owns it."), NOBODY)
    prompt = chats.ask([told("Bob", "10:06"), user("hi")], NOBODY)
    assert "Alice" not in prompt.text
    assert prompt.text.count("of Bob") == 1
    assert chats.reuse(prompt) > 150  # up to the context
    assert "current time (system message): 10:06" in prompt.text


def test_equal_greetings_do_not_lend_their_thinking() -> None:
    """Bob's answer came from elsewhere and is the same: it is not Alice's turn."""
    chats = Chats()
    hello = Said("Hello!", "Alice owns it.")
    chats.turn([PLAIN, sender("Alice", "hi")], hello, NOBODY)
    prompt = chats.ask([PLAIN, user("hi"), assistant("Hello!"), user("go")], NOBODY)
    assert "Alice" not in prompt.text


@pytest.mark.parametrize("other", [Client("bob"), NOBODY])
def test_no_thought_about_a_value_that_was_not_sent_any_more(
    other: Client,
) -> None:
    """Alice's context stood pinned in her prompt; she and Bob now send the same."""
    chats, alice = Chats(), Client("alice")
    chats.turn([told("Alice"), user("hi")], Said("x"), alice)
    without = system(
        f"Current time: 10:05\n{ORDERS}\n# Project Context\n{words(200, 1)}"
    )
    hello = Said("Hello!", "Alice owned it.")
    hers = chats.turn([without, user("hi")], hello, alice)
    assert "of Alice" in hers.text  # and that it is none now
    prompt = chats.ask([without, user("hi"), assistant("Hello!"), user("go")], other)
    assert "Alice" not in prompt.text


def test_two_who_were_greeted_alike_get_nothing_of_the_other() -> None:
    """Their values are gone from the history: which turn was whose is not known."""
    chats = Chats()
    for name in ("Alice", "Bob"):
        said = Said("Hello!", f"It is {name}.")
        chats.turn([PLAIN, sender(name, "hi")], said, NOBODY)
    prompt = chats.ask([LATER, user("hi"), assistant("Hello!"), user("go")], NOBODY)
    assert "Alice" not in prompt.text
    assert "Bob" not in prompt.text


def test_each_gets_its_own_where_the_context_tells_them_apart() -> None:
    """The block in the system message is sent again: it proves the chat."""
    chats = Chats()
    for name in ("Alice", "Bob"):
        chats.turn([told(name), user("hi")], Said("Hello!", f"It is {name}."), NOBODY)
    for name, other in (("Alice", "Bob"), ("Bob", "Alice")):
        history = [user("hi"), assistant("Hello!"), user("go")]
        prompt = chats.ask([told(name), *history], NOBODY)
        assert f"It is {name}." in prompt.text
        assert other not in prompt.text
        prompt = chats.ask([told(name, "10:07"), *history], NOBODY)
        assert "It is" not in prompt.text  # another clock may be another's
        assert other not in prompt.text


def test_a_chat_is_known_by_the_calls_that_were_issued_in_it() -> None:
    """Then what its client dropped is its own: it stays, and reuse goes through."""
    chats = Chats()
    call = ToolCall("call_f00d", "look", "{}")
    first = chats.turn(
        [PLAIN, sender("Alice", "hi")], Said("", "It is Alice.", (call,)), NOBODY
    )
    again = [PLAIN, user("hi"), assistant("", call), result("found", "call_f00d")]
    second = chats.turn(again, "Done.", NOBODY)
    assert second.reused >= first.kept - 2
    third = [*again, assistant("Done."), user("and now?")]
    turn = chats.turn(third, "Still.", NOBODY)
    assert turn.reused >= second.kept - 2


def test_another_chat_with_the_same_calls_ids_unsaid_stays_apart() -> None:
    """A chat that was proved lends nothing to one that only begins like it."""
    chats = Chats()
    call = ToolCall("call_f00d", "look", "{}")
    said = Said("", "It is Alice.", (call,))
    chats.turn([PLAIN, sender("Alice", "hi")], said, NOBODY)
    foreign = ToolCall("call_beef", "look", "{}")
    history = [PLAIN, user("hi"), assistant("", foreign), result("found", "call_beef")]
    assert "Alice" not in chats.ask(history, NOBODY).text


def test_a_chat_whose_clock_moves_gets_no_thought_back() -> None:
    """Without a session or calls it may be another's: no thought is put back."""
    chats = Chats()
    history = [PLAIN, user("hi")]
    for number in range(4):
        clock = system(f"{ORDERS}\nCurrent time: 10:{number + 10}\n{words(200, 1)}")
        turn = chats.turn([clock, *history[1:]], Said(f"a{number}", "Why?"), NOBODY)
        assert turn.reused > (400 if number else -1)  # the system text
        assert "Why?" not in turn.text
        history += [assistant(f"a{number}"), user(f"u{number}")]


def test_two_thoughts_behind_one_text_are_told_apart_or_left() -> None:
    """The same request twice, with another clock or not: either could be meant."""
    chats = Chats()
    for thought in ("One way.", "Another way."):
        chats.turn([PLAIN, user("hi")], Said("Hello!", thought), NOBODY)
    history = [user("hi"), assistant("Hello!"), user("go")]
    for told in (PLAIN, LATER):
        text = chats.ask([told, *history], NOBODY).text
        assert "One way." not in text
        assert "Another way." not in text


def test_values_within_one_session_go_to_the_turn_that_had_them() -> None:
    """
    A gateway's one session id for all: the sender decides, where it is sent.

    Where the system text says it, one history may have come from several: what Bob was
    told last takes Alice's thought away, and never stands in its place.
    """
    chats = Chats()
    client = Client(session="gateway")
    for name in ("Alice", "Bob"):
        chats.turn([told(name), user("hi")], Said("Hello!", f"It is {name}."), client)
    history = [told("Alice", "10:09"), user("hi"), assistant("Hello!"), user("go")]
    prompt = chats.ask(history, client)
    assert "It is Alice." not in prompt.text
    assert "It is Bob." not in prompt.text
    chats.turn(history, Said("Gone.", "Away."), client)
    history = [told("Alice", "10:10"), *history[1:], assistant("Gone."), user("And?")]
    assert "Away." in chats.ask(history, client).text


def test_notes_of_a_chat_stay_in_it() -> None:
    """What was said again to Alice is not said to Bob."""
    chats = Chats()
    first = chats.turn([told("Alice"), user("hi")], Said("Hello!"), NOBODY)
    history = [user("hi"), assistant("Hello!"), user("go")]
    second = chats.turn([told("Alice", "10:06"), *history], "Fine.", NOBODY)
    assert second.reused >= first.kept - 2
    assert "current time (system message): 10:06" in second.text
    prompt = chats.ask([told("Bob", "10:07"), *history], NOBODY)
    assert "Alice" not in prompt.text
    assert "10:06" not in prompt.text


def test_ids_that_mean_nothing_are_pinned_before_the_first_answer() -> None:
    """A message id says nothing of anybody, and is said anew."""
    chats = Chats()
    meta = json.dumps({"message_id": "aa11"})
    chats.turn(
        [system(f"{ORDERS}\n{meta}\n{words(200, 1)}"), user("hi")], "Hm.", NOBODY
    )
    other = json.dumps({"message_id": "bb22"})
    asked = [system(f"{ORDERS}\n{other}\n{words(200, 1)}"), user("hi")]
    prompt = chats.ask(asked, NOBODY)
    assert chats.reuse(prompt) > 400
    assert "message_id (system message): bb22" in prompt.text


def test_a_turn_before_a_value_that_was_not_there_is_another_chats() -> None:
    """The same words, and now a date before them: nobody was told that then."""
    chats = Chats()
    chats.turn([PLAIN, user("hi")], Said("Hello!", "No date."), NOBODY)
    date = "<system-reminder>\nThe current date is: Friday.\n</system-reminder>\n"
    history = [PLAIN, user(date, "hi"), assistant("Hello!"), user("go")]
    assert "No date." not in chats.ask(history, NOBODY).text


def test_a_status_is_not_lent_to_a_chat_that_only_sounds_the_same() -> None:
    """Without a line that names the folder it may be another project's."""
    chats = Chats()

    def told(branch: str) -> Message:
        status = f"gitStatus: This is the status.\nCurrent branch: {branch}"
        return system(ORDERS, status, words(300, 1))

    history = [user("hi"), assistant("Hello!"), user("go")]
    chats.turn([told("alpha"), user("hi")], Said("Hello!"), NOBODY)
    chats.turn([told("alpha"), *history], Said("Well."), NOBODY)
    asked = [told("beta"), *history, assistant("Well."), user("on")]
    assert "alpha" not in chats.ask(asked, NOBODY).text


def internal(text: str) -> Message:
    """OpenClaw's last message, kept in no later request."""
    marks = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
        "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
    )
    return user(f"{marks[0]}\n{text}\n{marks[1]}")


@pytest.mark.parametrize("other", [Client("b"), NOBODY], ids=["named", "nameless"])
@pytest.mark.parametrize("teller", [Client("a"), NOBODY], ids=["named", "nameless"])
def test_what_vanished_is_not_thought_of_in_another_chat(
    other: Client, teller: Client
) -> None:
    """Its turn was told something that no history shows."""
    chats = Chats()
    hello = Said("Hello!", "Alice is ill.")
    chats.turn([PLAIN, user("hi"), internal("Alice is ill.")], hello, teller)
    asked = [PLAIN, user("hi"), assistant("Hello!"), user("go")]
    assert "Alice" not in chats.ask(asked, other).text


def test_with_other_tools_it_is_another_prompt() -> None:
    """To the letter is all that the model read, its tools as well."""
    chats = Chats()
    chats.turn([PLAIN, user("hi")], Said("Hello!", "No tools."), Client("a"))
    asked = [PLAIN, user("hi"), assistant("Hello!"), user("go")]
    text = chats.ask(asked, Client("b", tools=(tool("look"),))).text
    assert "No tools." not in text
    assert "No tools." in chats.ask(asked, Client("c")).text


def test_two_proved_chats_keep_their_thoughts_behind_the_same_words() -> None:
    """Each has calls of its own; what follows them looks alike."""
    chats = Chats()
    talks = {}
    for name in ("41", "77"):
        call = ToolCall(f"call_{name}", "look", "{}")
        begun = [PLAIN, user("pick a number")]
        chats.turn(begun, Said("", "I look.", (call,)), NOBODY)
        begun += [assistant("", call), result("ok", call.id)]
        chats.turn(begun, Said("Done.", f"My number is {name}."), NOBODY)
        talks[name] = [*begun, assistant("Done."), user("which?")]
    for name, other in (("41", "77"), ("77", "41")):
        text = chats.ask(talks[name], NOBODY).text
        assert f"My number is {name}." in text
        assert f"My number is {other}." not in text


def test_claude_codes_git_status_is_its_own_sessions() -> None:
    """A new session there reads its own: file names are somebody's words."""
    chats = Chats()

    def opening(folder: str, status: str) -> Message:
        return user(
            f"Contents of {folder}/CLAUDE.md (project instructions, checked into the "
            "codebase):\n\nAnswer briefly.\n# gitStatus\nThis is the git status at the "
            f"start of the conversation.\n\nStatus:\n{status}\n\nRecent commits:\n"
            f"2ae11a9 Start\n\nClaude Code attached this.\n{words(200, 1)}"
        )

    orders = system(ORDERS)
    chats.turn([orders, opening("/p", "?? a.py")], Said("x"), Client("one"))
    prompt = chats.ask([orders, opening("/p", "M b.py")], Client("two"))
    assert "M b.py" in prompt.text
    assert "a.py" not in prompt.text


def test_ids_prove_nothing_of_what_is_said_behind_them() -> None:
    """Two try one question at 10:05 and 10:33: the thought is of the first."""
    chats, client = Chats(), Client(session=None, tools=(tool("read"),))
    call = ToolCall("call_1234567890ab", "read", '{"path": "a"}')
    said = [system(f"You help. {ORDERS}"), user("do it")]
    chats.turn(said, Said("", "first thought", (call,)), client)
    said += [assistant("", call), result("r", call.id)]
    chats.turn(said, Said("Done.", "second thought"), client)
    said += [assistant("Done.")]
    early = [*said, user("Current time: 10:05\ngo on")]
    chats.turn(early, Said("OK.", "thought at five"), client)
    late = [*said, user("Current time: 10:33\ngo on"), assistant("OK."), user("now?")]
    text = chats.ask(late, client).text
    assert "thought at five" not in text
    assert "second thought" in text
