"""A last message that is sent with each request and kept in none (OpenClaw 2026.9)."""

from collections.abc import Sequence

from sidecar.core.requests import Message, ToolCall
from testkit.chats import Chats, Client, Said, Turn, result, system, user, words

SYSTEM = system(words(80))


def internal(text: str = "Active exec sessions: none", seed: int = 9) -> Message:
    """What the client says last, each time."""
    body = f"{text}\n{words(60, seed)}"
    return user(
        f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{body}\n"
        "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )


def call(number: int) -> Said:
    """An answer that reads a file, with an id as the sidecar issues it."""
    made = ToolCall(f"call_{number:024x}", "read", f'{{"path": "/{number}"}}')
    return Said("", f"I read {number}.", (made,))


class Loop:
    """One conversation's tool loop; `last` is said behind all of it each time."""

    def __init__(self, chats: Chats, client: Client | None = None) -> None:
        self.chats, self.client = chats, client
        self.history: list[Message] = [SYSTEM]

    def ask(self, *new: Message, last: Message, said: Said) -> Turn:
        """One more request and its answer."""
        self.history += new
        turn = self.chats.turn([*self.history, last], said, self.client)
        self.history.append(said.echo)
        return turn


def results(number: int) -> Message:
    """What the tool said to call `number`."""
    return result(f"content {number} " + words(20, number), f"call_{number:024x}")


def test_unchanged_it_stays_where_it_was_first_said() -> None:
    """Each request of a tool loop goes on where the one before ended."""
    loop = Loop(Chats())
    turn = loop.ask(user("go"), last=internal(), said=call(1))
    for number in range(2, 6):
        kept = turn.kept
        new = results(number - 1)
        turn = loop.ask(new, last=internal(), said=call(number))
        assert turn.reused >= kept - 1
        assert turn.text.count("Active exec sessions") == 1
        assert turn.text.index("Active exec") < turn.text.index("content 1")


def test_through_a_new_question_too_while_it_is_the_same() -> None:
    """The model has read it; nothing new is to be said."""
    loop = Loop(Chats())
    loop.ask(user("go"), last=internal(), said=call(1))
    done = loop.ask(results(1), last=internal(), said=Said("Done.", "So."))
    turn = loop.ask(user("and now?"), last=internal(), said=Said("More."))
    assert turn.reused >= done.kept - 1
    assert turn.text.count("Active exec sessions") == 1


def test_changed_it_stands_where_the_client_has_it() -> None:
    """The old one is not said any more; the model's own turns are put back."""
    loop = Loop(Chats())
    loop.ask(user("go"), last=internal(), said=call(1))
    loop.ask(results(1), last=internal(), said=Said("Done.", "So I am done."))
    turn = loop.ask(user("next"), last=internal("Active: 1"), said=Said("More."))
    assert "Active exec sessions" not in turn.text
    assert turn.text.index("Active: 1") > turn.text.index("next")
    assert turn.prompt.report.num_spliced == 2
    assert "So I am done." in turn.text
    again = loop.ask(user("once more"), last=internal("Active: 1"), said=Said("Yes."))
    assert again.reused >= turn.kept - 1


def test_what_was_said_last_counts() -> None:
    """A, then B, then A again: it stands at the end, behind what was done since."""
    loop = Loop(Chats())
    first, second = internal("state A"), internal("state B")
    loop.ask(user("go"), last=first, said=call(1))
    loop.ask(results(1), last=second, said=call(2))
    turn = loop.ask(results(2), last=first, said=Said("Done."))
    assert turn.text.count("state A") == 1
    assert "state B" not in turn.text
    assert turn.text.index("state A") > turn.text.index("content 2")


def test_two_chats_with_equal_first_words_keep_their_own() -> None:
    """No session ids; neither reads what the other was told."""
    chats = Chats()
    nobody = Client(session=None)
    loops = [Loop(chats, nobody), Loop(chats, nobody)]
    blocks = [internal("sender Alice", 1), internal("sender Bob", 2)]
    for loop, block, number in zip(loops, blocks, (1, 11), strict=True):
        loop.ask(user("hi"), last=block, said=call(number))
    for loop, block, number in zip(loops, blocks, (1, 11), strict=True):
        turn = loop.ask(results(number), last=block, said=Said("Hello."))
        names = [name for name in ("Alice", "Bob") if name in turn.text]
        assert names == [block.text.split()[2]]
        assert turn.text.index("sender") < turn.text.index("content")


def test_one_chats_message_moves_no_other_chats() -> None:
    """Both begin alike; the second one says the same much later."""
    chats = Chats()
    first, second = Loop(chats), Loop(chats)
    first.ask(user("go"), last=internal(), said=call(1))
    second.history += [user("go"), call(11).echo, results(11)]
    turn = second.ask(user("news?"), last=internal(), said=Said("None."))
    assert turn.text.index("Active exec") > turn.text.index("news?")


def test_one_that_was_gone_meanwhile_is_said_anew() -> None:
    """It did not stay the same: for a while it was not there."""
    chats = Chats()
    loop = Loop(chats)
    loop.ask(user("go"), last=internal(), said=call(1))
    loop.history.append(results(1))
    between = chats.turn(loop.history, call(2))
    loop.history.append(between.said.echo)
    turn = loop.ask(results(2), last=internal(), said=Said("Done."))
    assert turn.text.index("Active exec") > turn.text.index("content 2")


def test_without_pinning_the_prompt_is_never_altered() -> None:
    """CACHE_PINNING=false: all stands as it was sent."""
    loop = Loop(Chats(pinning=False))
    loop.ask(user("go"), last=internal(), said=call(1))
    turn = loop.ask(results(1), last=internal(), said=Said("Done."))
    assert turn.text.index("Active exec") > turn.text.index("content 1")


def test_one_that_is_kept_is_an_ordinary_message() -> None:
    """Only the last message of a request can vanish."""
    chats = Chats()
    asked: Sequence[Message] = [SYSTEM, user("go"), internal(), user("and this")]
    assert chats.ask(asked).text == chats.plain_text(asked)


def test_a_turn_is_known_by_the_ids_of_its_calls() -> None:
    """Whatever became of the messages before it."""
    chats = Chats()
    said = call(1)
    chats.turn([SYSTEM, user("first words")], said)
    edited = [SYSTEM, user("other words"), said.echo, results(1)]
    prompt = chats.ask(edited)
    assert prompt.report.num_spliced == 1
    assert "I read 1." in prompt.text


def test_ids_of_another_key_or_with_another_text_name_no_turn() -> None:
    """They are proof only together with what was said, for whom."""
    chats = Chats()
    said = call(1)
    chats.turn([SYSTEM, user("first words")], said)
    edited = [SYSTEM, user("other words"), said.echo, results(1)]
    assert chats.ask(edited, Client(key="other")).report.num_spliced == 0
    echo = Message("assistant", ("I deleted it.",), None, said.calls)
    changed = [SYSTEM, user("other words"), echo, results(1)]
    assert chats.ask(changed).report.num_spliced == 0
