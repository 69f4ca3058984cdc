"""Sessions, threads, and the last conversation of each."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from sidecar.core.conversation import Conversation, is_implicit
from sidecar.core.requests import Message, ToolCall
from sidecar.memory import session_turn_store
from sidecar.memory.session_turn_store import Change, TurnStore
from sidecar.volatile import spans
from sidecar.volatile.rules import load_rules
from testkit.chats import Chats, Client, Said, assistant, system, user, words
from testkit.clock import Clock

MAIN = Conversation("key", "s", "main")
RULES = load_rules()


def advance(store: TurnStore, *lists: str) -> list[bool]:
    return [store.advance(MAIN, text, len(text)) for text in lists]


def stable(store: TurnStore, digests: str, conversation: Conversation = MAIN) -> Change:
    return store.compare(conversation, digests)


def test_a_conversation_that_goes_on_advances() -> None:
    """Each extends the one before."""
    store = TurnStore(0)
    assert advance(store, "ab", "abcd", "abcd") == [True, True, True]
    assert stable(store, "abcdef") == Change(4, ())


def test_one_that_does_not_extend_is_refused() -> None:
    """A helper call must not push the main conversation out."""
    store = TurnStore(0)
    assert advance(store, "abcd", "ab", "axcd", "x") == [True, False, False, False]
    assert stable(store, "abcd").stable_messages == 4


def test_three_refused_in_a_row_that_extend_one_another_replace_it() -> None:
    """The client compacted."""
    store = TurnStore(0)
    assert advance(store, "abcd", "S", "Se", "Sef") == [True, False, False, True]
    assert stable(store, "Sefg").stable_messages == 3


def test_the_row_breaks_where_one_does_not_extend_the_last() -> None:
    """Counting begins again."""
    store = TurnStore(0)
    assert advance(store, "abcd", "S", "Se", "T", "Tu") == [True, *[False] * 4]
    assert advance(store, "Tuv") == [True]


def test_a_good_one_in_between_clears_the_row() -> None:
    """The main conversation lives."""
    store = TurnStore(0)
    assert advance(store, "ab", "S", "Se", "abc", "Sef") == [
        True, False, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("abc", "abcde", Change(3, ())),
        ("abc", "ab", Change(2, ("delete 1",))),
        ("abc", "axc", Change(1, ("insert 0", "delete 0"))),
        ("abcd", "abd", Change(2, ("delete 0",))),
        ("abc", "abxc", Change(2, ("insert 0",))),
        ("abc", "xyz", Change(0, ("replace 3",))),
        ("az", "a" + "bcdefghijk" + "z", Change(1, tuple(
            f"insert {i}" for i in range(8)
        ))),
    ],
)  # fmt: skip
def test_a_change_is_described(old: str, new: str, change: Change) -> None:
    """What stayed, and the first eight differences, counted from there."""
    store = TurnStore(0)
    advance(store, old)
    assert stable(store, new) == change


def test_an_unknown_thread_has_no_change() -> None:
    """Nothing to compare with; another key's is another's."""
    store = TurnStore(0)
    advance(store, "abc")
    for conversation in (replace(MAIN, thread="x"), replace(MAIN, tenant="y")):
        assert stable(store, "abc", conversation) == Change(0, (), is_new=True)


def test_a_shorter_thread_of_the_session_is_a_subagent() -> None:
    """Titles, recaps and sub-agents; the main thread is the longest."""
    store = TurnStore(0)
    store.advance(MAIN, "ab", 5000)
    helper = replace(MAIN, thread="helper")
    assert store.is_subagent(helper, 300)
    assert not store.is_subagent(helper, 6000)
    assert not store.is_subagent(MAIN, 300)
    assert not store.is_subagent(replace(helper, session="another"), 300)
    assert not store.is_subagent(replace(helper, tenant="another"), 300)
    store.advance(helper, "x", 7000)
    assert not store.is_subagent(helper, 300)
    assert store.is_subagent(MAIN, 5000)


def test_idle_threads_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the idle time, counted from the last turn; 0 keeps them."""
    idle, kept = TurnStore(60), TurnStore(0)
    for store in (idle, kept):
        store.advance(MAIN, "abc", 1)
    Clock(monkeypatch, "sidecar.memory.session_turn_store").advance(100)
    assert stable(idle, "abc").stable_messages == 0
    assert stable(kept, "abc").stable_messages == 3


def test_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one not heard of for longest leaves."""
    monkeypatch.setattr(session_turn_store, "_MAX_THREADS", 2)
    store = TurnStore(0)
    for thread in "abac":
        store.advance(replace(MAIN, thread=thread), thread, 1)
    known = [
        bool(stable(store, t, replace(MAIN, thread=t)).stable_messages) for t in "abc"
    ]
    assert known == [True, False, True]


def test_digests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates print nothing for an empty message: the context bounds none."""
    monkeypatch.setattr(session_turn_store, "_MAX_DIGESTS", 100)
    store = TurnStore(0)
    for thread in range(30):
        conversation = replace(MAIN, thread=str(thread))
        store.advance(conversation, [f"{n}" for n in range(20)], 1)
        refused = [f"other {n}" for n in range(10)]  # but kept
        store.advance(conversation, refused, 1)
    assert sum(thread.weight for thread in store._threads.values()) <= 100
    assert len(store._threads) == 3


def digests(messages: Sequence[Message]) -> list[str]:
    return session_turn_store.message_digests(spans.mark(messages, RULES))


def test_digests_are_of_canonical_messages() -> None:
    """A clock does not change them; words, roles and calls do."""
    base = digests([user("Current time is 10:05.")])
    assert digests([user("Current time is 10:06.\n")]) == base
    for other in (
        user("Current time is late."),
        system("Current time is 10:05."),
        assistant("Current time is 10:05."),
    ):
        assert digests([other]) != base
    a, b = (ToolCall("1", "f", text) for text in ('{"a": 1}', '{"a": 2}'))
    assert digests([assistant("", a)]) != digests([assistant("", b)])
    assert digests([assistant("", a)]) == digests([assistant("", replace(a, id="2"))])


def test_a_thread_is_named_by_its_first_user_message() -> None:
    """Canonical: a new id in it is the same thread."""

    def name(*messages: Message) -> str:
        return session_turn_store.thread_name(spans.mark(messages, RULES))

    base = name(system("s"), user('"message_id": "1" go'), user("more"))
    assert name(system("t"), user('"message_id": "2" go')) == base
    assert name(user("other")) != base
    assert name(system("s"), assistant("a")) == ""


def test_a_session_without_a_name_is_known_by_its_beginning() -> None:
    """The first 128 canonical ids."""
    ids = list(range(200))
    session = session_turn_store.implicit_session(ids)
    assert session.startswith("implicit-")
    assert len(session) == len("implicit-") + 16
    assert is_implicit(session)
    assert session_turn_store.implicit_session([*ids[:128], 7]) == session
    assert session_turn_store.implicit_session([7, *ids]) != session
    assert not is_implicit("mine")


def conversation_of(
    chats: Chats, messages: Sequence[Message], client: Client
) -> Conversation:
    return chats.ask(messages, client).pending_turn.record.conversation


def test_whoever_sends_calls_back_continues_their_thread() -> None:
    """Even if the first message was changed since; not in another session or key."""
    chats = Chats()
    said = Said("", calls=(ToolCall("call_x1", "look", "{}"),))
    chats.turn([user("go")], said)
    mine = conversation_of(chats, [user("go")], Client())
    changed = [user("go (edited)"), assistant("", *said.calls)]
    assert conversation_of(chats, changed, Client()) == mine
    assert conversation_of(chats, changed[:1], Client()) != mine
    for client in (Client("other"), Client("s", "other")):
        assert conversation_of(chats, changed, client).thread != mine.thread


def test_a_helper_call_is_prepared_as_a_subagent() -> None:
    """And the log says whose conversation it is."""
    chats = Chats()
    main = chats.turn([user("go " + words(80))])
    helper = chats.ask([user("give it a title")])
    assert (main.prompt.model.is_subagent, helper.model.is_subagent) == (False, True)
    assert helper.model.session == "s"
    unnamed = chats.ask([user("hi")], Client(None))
    assert is_implicit(unnamed.model.session)


def test_the_report_says_what_changed_since_the_last_turn() -> None:
    """By message."""
    chats = Chats()
    first = chats.turn([system("s"), user("go")])
    asked = [system("s"), user("go"), first.said.echo, user("and?")]
    report = chats.ask(asked).report
    assert (report.stable_messages, report.changes) == (2, ())
    chats.turn(asked)
    assert chats.memory.counters["turn_write_refused"] == 0
    chats.turn([system("s"), user("go"), user("other")])
    assert chats.memory.counters["turn_write_refused"] == 1


def told(sessions: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """What the session view says of sessions whose clients named these parents."""
    store = TurnStore(0)
    for session, parents in sessions.items():
        store.advance(Conversation("k", session, "t"), "ab", 9, parents)
    return {view.session: view.parents for view in store.sessions()}


def test_a_session_is_shown_with_its_line_of_parents() -> None:
    """Its own, then theirs, whether they were seen or only named."""
    line = told({"a": ("older",), "b": ("a",), "c": ("b", "aunt")})
    assert line == {"a": ("older",), "b": ("a", "older"), "c": ("b", "aunt", "a",
                                                              "older")}  # fmt: skip


def test_parents_that_name_one_another_end_somewhere() -> None:
    """A session is no parent of its own, and each counts once."""
    line = told({"a": ("b",), "b": ("a", "b"), "c": ("c",)})
    assert line == {"a": ("b",), "b": ("a",), "c": ()}


def test_a_line_of_parents_is_eight_long_at_max() -> None:
    names = [f"s{number}" for number in range(20)]
    parents = {name: (older,) for older, name in pairwise(names)}
    assert told(parents)["s19"] == tuple(reversed(names[11:19]))


def test_parents_are_looked_for_within_the_key() -> None:
    """Equal names of another key are other sessions."""
    store = TurnStore(0)
    store.advance(Conversation("k", "mine", "t"), "ab", 9, ("shared",))
    store.advance(Conversation("other", "shared", "t"), "ab", 9, ("secret",))
    assert {v.session: v.parents for v in store.sessions()}["mine"] == ("shared",)


def test_a_session_is_shown_by_its_longest_thread() -> None:
    """What a later request does not say again is still known."""
    store = TurnStore(0)
    store.advance(MAIN, "ab", 50, ("parent",))
    store.advance(MAIN, "abcd", 90)
    store.advance(replace(MAIN, thread="helper"), "x", 7)
    (view,) = store.sessions()
    assert (view.num_threads, view.num_messages, view.num_tokens) == (2, 4, 90)
    assert view.parents == ("parent",)


def test_a_chat_without_a_name_is_shown_as_one() -> None:
    """Each of its turns writes under a new thread, in place of the one before."""
    chats, unnamed = Chats(), Client(session=None)
    talk = [system(words(100)), user("a")]
    for question in "bcd":
        chats.turn(talk, f"To {question}.", unnamed)
        talk += [assistant(f"To {question}."), user(question)]
    prompt = chats.ask(talk, unnamed)
    assert not prompt.report.is_new
    assert prompt.report.stable_messages == len(talk) - 2
    assert [view.num_threads for view in chats.memory.turns.sessions()] == [1]
