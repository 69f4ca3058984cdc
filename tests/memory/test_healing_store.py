"""A turn is found again by what the client saw of it and by what came before it."""

import json

import pytest

from sidecar.core.conversation import Conversation
from sidecar.core.requests import Message, Tool, ToolCall
from sidecar.memory.healing_store import (
    ContextHasher,
    HealingStore,
    TurnQuery,
    is_edited,
    visible_hash,
)
from sidecar.memory.known_turns import Healed, KnownTurn
from sidecar.memory.tombstones import Context
from testkit.chats import Chats, Client, Said, assistant, result, system, user

HERE = Context("here", "here")
MINE = Conversation("key", "s", "thread")


def call(arguments: str, call_id: str = "call_1", name: str = "look") -> ToolCall:
    return ToolCall(call_id, name, arguments)


def healed(text: str, size: int = 2) -> Healed:
    return Healed("H", tuple(range(size)), text, "")


def found(
    turns: HealingStore, visible: str, context: Context, key: str | None,
    session: str | None,
) -> Healed | None:  # fmt: skip
    turn = turns.find(visible, context, TurnQuery(key, session))
    return turn.healed if turn else None


def store(entries: int = 100, num_bytes: int = 1 << 20) -> HealingStore:
    return HealingStore(entries, num_bytes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([call('{"a": 1, "b": "x"}')], [call('{"b":"x","a":1}')]),
        ([call('{"a": "é"}')], [call('{"a": "\\u00e9"}')]),
        ([call("{}")], [call("")]),
        ([call("{}", "call_1")], [call("{}", "toolu_9")]),
        ([call("{ not json")], [call("{ not json", "x")]),
    ],
    ids=["order and spacing", "escapes", "empty", "ids", "unparsable"],
)
def test_calls_that_mean_the_same_are_one(
    one: list[ToolCall], other: list[ToolCall]
) -> None:
    """String or object, spaced or not, under whatever id."""
    assert visible_hash("t", one) == visible_hash("  t\n", other)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("t ", [call('{"a": 2}')]),
        ("u", [call('{"a": 1}')]),
        ("t", []),
        ("t", [call('{"a": 1}', name="find")]),
        ("t", [call('{"a": 1}'), call('{"a": 1}')]),
        ("t", [call('{"a": "1"}')]),
        ("t", [call("a")]),
    ],
)
def test_turns_that_look_different_are_different(
    text: str, calls: list[ToolCall]
) -> None:
    """Text, names, arguments and number count."""
    assert visible_hash(text, calls) != visible_hash("t", [call('{"a": 1}')])


def test_nothing_visible_has_no_hash() -> None:
    """There is nothing to find it by."""
    assert visible_hash(" \n", []) is None


def test_equal_context_in_the_session_comes_first() -> None:
    """Two turns that look alike are told by what came before them."""
    turns = store()
    for name in ("a", "b"):
        turns.record(KnownTurn("h", Context(name, name), MINE, healed(name)))
    for name in ("a", "b"):
        assert found(turns, "h", Context(name, name), "key", "s") == healed(name)


def test_another_session_lends_only_what_stood_behind_the_very_same_text() -> None:
    """A turn may quote volatile values, and those never leave their thread."""
    turns = store()
    turns.record(KnownTurn("h", Context("c", "to the letter"), MINE, healed("a")))
    letter, drifted = Context("c", "to the letter"), Context("c", "drifted")
    assert found(turns, "h", letter, "key", "other") == healed("a")
    assert found(turns, "h", drifted, "key", "other") is None
    assert found(turns, "h", drifted, "key", "s") == healed("a")


def test_sessions_without_a_name_go_by_the_context() -> None:
    """The letter decides between two whose volatile values differ."""
    turns = store()
    unnamed = Conversation("key", "implicit-0123", "thread")
    turns.record(KnownTurn("h", Context("c", "alpha"), unnamed, healed("a")))
    assert found(turns, "h", Context("c", "alpha"), "key", None) == healed("a")
    assert found(turns, "h", Context("c", "later"), "key", None) is None
    assert found(turns, "h", Context("c", "later"), "key", "named") is None
    # Of equal words at another time: the clock may come to the other one's time.
    turns.record(KnownTurn("h", Context("c", "beta"), unnamed, healed("b", 3)))
    for name in ("alpha", "beta"):
        assert found(turns, "h", Context("c", name), "key", None) is None


@pytest.mark.parametrize("session", ["s", None])
def test_the_only_turn_of_a_session_needs_its_context_too(session: str | None) -> None:
    """A cloud model's "Done." in that session is not the local turn's."""
    turns = store()
    turns.record(KnownTurn("h", Context("before", "before"), MINE, healed("a")))
    assert found(turns, "h", HERE, "key", session) is None


def test_a_turn_of_another_session_whose_values_differ_is_ambiguous() -> None:
    """A guess could be a lie: left as it is, and counted."""
    turns = store()
    for name in ("a", "b"):
        turns.record(KnownTurn("h", Context("here", name), MINE, healed(name)))
    assert found(turns, "h", HERE, "key", "another") is None
    assert turns.num_ambiguous == 1


@pytest.mark.parametrize("session", ["s", None])
def test_turns_never_leave_their_key(session: str | None) -> None:
    """Not by context, not by session."""
    turns = store()
    turns.record(KnownTurn("h", HERE, MINE, healed("a")))
    assert found(turns, "h", HERE, "another key", session) is None
    assert found(turns, "h", HERE, None, session) is None


def test_an_id_is_known_to_the_key_that_it_was_issued_to() -> None:
    """It proves nothing of who asks with another one."""
    turns = store()
    kept = turns.record(KnownTurn("h", HERE, MINE, healed("a")), ["call_1"])
    assert turns.issued_any(["", "call_0", "call_1"], "key") == kept
    for key in ("another key", None):
        assert turns.issued_any(["call_1"], key) is None


def test_a_turn_given_again_replaces_the_older_one() -> None:
    """The client asked for another try and kept that."""
    turns = store()
    turns.record(KnownTurn("h", HERE, MINE, healed("a")))
    turns.record(KnownTurn("h", HERE, MINE, healed("b")))
    assert found(turns, "h", HERE, "key", "s") == healed("b")


def test_eight_candidates_of_one_place_are_kept() -> None:
    """The oldest leaves first: they differ in volatile values alone."""
    turns = store()
    for number in range(9):
        turn = KnownTurn("h", Context("c", str(number)), MINE, healed(str(number)))
        turns.record(turn)
    assert found(turns, "h", Context("c", "0"), "key", "other") is None
    assert found(turns, "h", Context("c", "1"), "key", "other") == healed("1")


def test_an_agent_that_says_the_same_a_hundred_times_is_known_each_time() -> None:
    """A heartbeat's answer, or "Done.": only the caps over all turns count."""
    turns = store()
    for number in range(100):
        place = Context(str(number), str(number))
        turns.record(KnownTurn("h", place, MINE, healed(str(number))))
    for number in range(100):
        place = Context(str(number), str(number))
        assert found(turns, "h", place, "key", "s") == healed(str(number))


def test_the_min_recently_used_turn_leaves_first() -> None:
    """By number of places."""
    turns = store(entries=2)
    turns.record(KnownTurn("a", HERE, MINE, healed("a")))
    turns.record(KnownTurn("b", HERE, MINE, healed("b")))
    assert found(turns, "a", HERE, "key", "s")
    turns.record(KnownTurn("c", HERE, MINE, healed("c")))
    assert found(turns, "b", HERE, "key", "s") is None
    assert found(turns, "a", HERE, "key", "s") == healed("a")


def test_the_store_keeps_to_its_bytes() -> None:
    """Ids count eight bytes each."""
    turns = store(num_bytes=20_000)
    for number in range(20):
        turns.record(KnownTurn(str(number), HERE, MINE, healed("x", 1000)))
    kept = [n for n in range(20) if found(turns, str(n), HERE, "key", "s")]
    assert kept == [18, 19]
    turns.record(KnownTurn("big", HERE, MINE, healed("x", 10_000)))
    assert found(turns, "big", HERE, "key", "s") is None


def test_the_context_is_a_chain() -> None:
    """Order, roles, texts and calls all count; canonical and literal apart."""

    def value(*entries: tuple[str, str, str]) -> Context:
        hasher = ContextHasher()
        for role, canonical, literal in entries:
            hasher.add(role, (canonical, literal), None)
        return hasher.value

    base = value(("user", "a", "a"), ("user", "b", "b"))
    assert value(("user", "b", "b"), ("user", "a", "a")) != base
    assert value(("user", "a", "a"), ("tool", "b", "b")) != base
    assert value(("user", "ab", "ab")) != base
    drifted = value(("user", "a", "a7"), ("user", "b", "b"))
    assert drifted.canonical == base.canonical
    assert drifted.literal != base.literal
    assert value(("user", "\ud800", "\ud800")) != base


@pytest.mark.parametrize(
    ("echoed", "edited"),
    [(None, False), ("", False), (" \n", False), ("why", False), (" why\n", False),
     ("why not", True)],
)  # fmt: skip
def test_reasoning_that_was_changed_is_an_edit(
    echoed: str | None, edited: bool
) -> None:
    """White space around it is not."""
    turn = Healed("H", (1,), "raw", "why")
    assert is_edited(Message("assistant", ("t",), echoed), turn) is edited


def ask_again(chats: Chats, said: Said, echo: Message, client: Client) -> str:
    """The text of the second prompt of a conversation."""
    chats.turn([user("go")], said, client)
    results = [result("out", c.id) for c in echo.tool_calls]
    return chats.ask([user("go"), echo, *results, user("and?")], client).text


LOOK = Tool(
    "look",
    {"type": "object", "properties": {"replace_all": {"default": False}, "odd": 7}},
    {"type": "function", "function": {
        "name": "look", "description": "x",
        "parameters": {"properties": {"replace_all": {"default": False}}}}},
)  # fmt: skip
LOOKED = Said("I look.", "hm hm", (call('{"path": "a.py"}', "call_ab12"),))


@pytest.mark.parametrize(
    "echoed",
    [
        call('{"path": "a.py"}', "call_ab12"),
        call('{"path":"a.py"}', "callab12"),
        call('{"path": "a.py"}', "toolu_01"),
        call('{"path": "a.py"}', ""),
        call('{"path": "a.py", "replace_all": false}', "call_ab12"),
        call('{"replace_all": false, "path": "a.py"}', "callab12"),
    ],
    ids=["same", "no underscore", "other id", "no id", "default", "both"],
)
def test_what_clients_do_to_calls_does_not_undo_healing(echoed: ToolCall) -> None:
    """Spacing, ids, and arguments they add with the schema's default."""
    client = Client(tools=(LOOK,))
    text = ask_again(Chats(), LOOKED, assistant("I look.", echoed), client)
    assert "hm hm" in text
    assert text.count("replace_all") == 1  # in the tool's schema


@pytest.mark.parametrize(
    "echo",
    [
        assistant("I looked.", *LOOKED.calls),
        assistant("I look.", call('{"path": "b.py"}', "toolu_01")),
        assistant("I look.", call('{"path": "a.py"}', "toolu_01", "find")),
        assistant("I look."),
        assistant("I look.", *LOOKED.calls, reasoning="no, this"),
    ],
    ids=["text", "arguments", "name", "calls gone", "reasoning"],
)
def test_an_edited_turn_goes_through_the_template(echo: Message) -> None:
    """What the user wrote is what the model reads."""
    text = ask_again(Chats(), LOOKED, echo, Client())
    assert "hm hm" not in text
    for part in (echo.text, echo.reasoning or "", *(c.name for c in echo.tool_calls)):
        assert part in text
    for edited in echo.tool_calls:
        assert json.loads(edited.arguments)["path"] in text


@pytest.mark.parametrize(
    "edited",
    [call('{"path": "b.py"}', "call_ab12"), call("{}", "call_ab12"),
     call('{"path": "a.py"}', "call_ab12", "find"),
     call('{"path": "a.py", "force": true}', "call_ab12"),
     call('{"path": "a.py", "replace_all": true}', "call_ab12"),
     call('{"path": "a.py", "replace_all": 0}', "call_ab12")],
    ids=["changed", "taken away", "other function", "added", "no default", "zero"],
)  # fmt: skip
def test_an_edited_call_is_not_healed_by_its_id(edited: ToolCall) -> None:
    """Defaults that a client adds are none; all else is told as it was sent."""
    client = Client(tools=(LOOK,))
    text = ask_again(Chats(), LOOKED, assistant("I look.", edited), client)
    assert "hm hm" not in text
    assert json.dumps(json.loads(edited.arguments)) in text


def test_echoed_reasoning_that_is_the_models_own_is_no_edit() -> None:
    """Clients that keep it heal like those that drop it."""
    echo = assistant("I look.", *LOOKED.calls, reasoning="hm hm\n")
    text = ask_again(Chats(), LOOKED, echo, Client())
    assert text.count("hm hm") == 1


def test_equal_answers_heal_to_their_own_thinking() -> None:
    """OK and OK, thought about differently."""
    chats = Chats()
    first = chats.turn([user("one")], Said("OK", "about one"))
    asked = [user("one"), first.said.echo, user("two")]
    second = chats.turn(asked, Said("OK", "about two"))
    text = chats.ask([*asked, second.said.echo, user("three")]).text
    assert text.index("about one") < text.index("two") < text.index("about two")
    assert text.count("about one") == text.count("about two") == 1


@pytest.mark.parametrize("session", ["other", "s", None])
def test_a_text_written_by_hand_heals_from_no_other_conversation(
    session: str | None,
) -> None:
    """It looks like an answer to another question."""
    chats = Chats()
    chats.turn([user("one")], Said("OK", "a secret"), Client("s"))
    asked = [user("quite another"), assistant("OK"), user("and?")]
    client = Client(session)
    prompt = chats.ask(asked, client)
    assert prompt.text == chats.plain_text(asked, client)


@pytest.mark.parametrize("session", ["s", "other", None])
def test_another_key_never_reads_this_ones_thinking(session: str | None) -> None:
    """Equal words in an equal conversation or not."""
    chats = Chats()
    chats.turn([user("one")], Said("OK", "a secret"), Client("s", "key A"))
    asked = [user("one"), assistant("OK"), user("and?")]
    client = Client(session, "key B")
    assert chats.ask(asked, client).text == chats.plain_text(asked, client)


@pytest.mark.parametrize("session", ["alpha", None])
def test_thinking_about_one_chat_stays_out_of_the_other(session: str | None) -> None:
    """Two chats whose words are equal but for the volatile block."""
    chats = Chats()

    def asked(chat: str) -> list[Message]:
        block = f'## Inbound Context (trusted metadata)\n```json\n{{"c": "{chat}"}}'
        return [system(f"Hello.\n{block}\n```\n\n# Project Context\n"), user("hi")]

    for chat in ("alpha", "beta"):
        client = Client(session and chat)
        chats.turn(asked(chat), Said("Hello!", f"this is {chat}"), client)
    following = [*asked("alpha"), assistant("Hello!"), user("and?")]
    prompt = chats.ask(following, Client(session))
    assert "this is alpha" in prompt.text
    assert "beta" not in prompt.text


def test_a_turn_that_replaces_another_takes_only_its_own_room() -> None:
    """A regeneration a hundred times over pushes nobody out."""
    turns = store(num_bytes=4000)
    turns.record(KnownTurn("kept", HERE, MINE, healed("k")))
    for number in range(100):
        turns.record(KnownTurn("again", HERE, MINE, healed(f"r{number}")))
    assert found(turns, "kept", HERE, "key", "s") == healed("k")
    assert found(turns, "again", HERE, "key", "s") == healed("r99")


def test_an_older_try_from_a_file_is_seen_to_differ() -> None:
    """Though its mark is not there, and whichever is known first."""
    turns = store()
    newer = turns.record(KnownTurn("h", HERE, MINE, healed("newer")))
    turns.tombstones.clear()
    older = KnownTurn("h", HERE, MINE, healed("older", 3), time=newer.time - 1)
    turns.load(older, ())
    assert found(turns, "h", HERE, "key", "s") is None


def test_what_is_read_while_its_place_is_answered_is_known_afterwards() -> None:
    """Only looking for it asks what hides it."""
    turns = store()
    turns.answer_begun(HERE, MINE)
    turns.load(KnownTurn("h", HERE, MINE, healed("a"), time=5), ())
    assert found(turns, "h", HERE, "key", "s") is None
    turns.answer_ended(HERE, MINE)
    assert found(turns, "h", HERE, "key", "s") == healed("a")
