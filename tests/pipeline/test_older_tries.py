"""
What was shown last at a place: no older turn that looks like it is put back there.

In this process, in the next one, and in one beside it.
"""

import json
from collections.abc import Callable, Sequence

import pytest

from sidecar.core.conversation import ForgetFilter
from sidecar.core.requests import Message, ToolCall
from sidecar.memory import conversation_memory
from sidecar.memory.healing_store import HealingStore, visible_hash
from sidecar.memory.unwritten_turns import UnwrittenTurns
from testkit.chats import Chats, Client, Said, assistant, result, system, user, words

ONE, TWO, NOBODY = Client("one"), Client("two"), Client(None)
TALK = [system(words(200)), user("well?")]
GOES_ON = [*TALK, assistant("Done."), user("go on")]
CALL = ToolCall("call_1", "look", "{}")
BRANCHES = {"10:00": "main", "10:01": "other", "10:02": "main"}


class Written(Chats):
    """Chats whose turns are written to a disk, and read again by other processes."""

    def __init__(self) -> None:
        super().__init__(min_gain=1)
        self.memory.unwritten_turns = UnwrittenTurns()
        self.memory.tombstones.keep_log()
        self.slots: list[tuple[Sequence[object], object]] = []
        self.log: list[str] = []

    def say(
        self,
        talk: Sequence[Message],
        thought: str,
        client: Client = ONE,
        calls: tuple[ToolCall, ...] = (),
    ) -> None:
        """Answer "Done.", and have it written."""
        said = Said("Done.", thought, calls)
        path = self.turn(talk, said, client).prompt.model_ids
        self.slots.append(self.memory.save(path, ""))
        self.memory.saved(self.slots[-1][0])  # type: ignore[arg-type]
        self.write_marks()

    def write_marks(self) -> None:
        lines = self.memory.tombstones.unlogged()
        self.log += lines
        self.memory.tombstones.logged(lines)

    def cut(self, talk: Sequence[Message], client: Client = ONE) -> None:
        """Answer "Done.", up to a stop string."""
        self.answer(self.ask(talk, client), Said("Done.", "cut"), sampled=())
        self.write_marks()

    def break_off(self, talk: Sequence[Message], client: Client = ONE) -> None:
        """Have a client go away that was shown more."""
        shown = conversation_memory.AssistantOutput("Done. And", "", (), ())
        self.memory.note_unkept(self.ask(talk, client).pending_turn, shown)
        self.write_marks()

    def restart(self, *, order: int = 1) -> None:
        """Another process reads what is there."""
        self.forget_words()
        self.memory.tombstones.learn(self.log)
        self.read_slots(order=order)

    def forget_words(self) -> None:
        self.memory.healing = HealingStore(100, 1 << 20)
        self.memory.tombstones.keep_log()

    def read_slots(self, *, order: int = 1) -> None:
        for kept, canonical in self.slots[::order]:
            self.memory.load(kept, canonical)  # type: ignore[arg-type]

    def text(self, client: Client = ONE, goes_on: Sequence[Message] = GOES_ON) -> str:
        """Of the next prompt."""
        return self.ask(goes_on, client).text


Unkept = Callable[[Written, Sequence[Message], Client], None]


@pytest.fixture(params=[Written.cut, Written.break_off], ids=["cut", "broken off"])
def unkept(request: pytest.FixtureRequest) -> Unkept:
    """How an answer ends that cannot be put back."""
    found: Unkept = request.param
    return found


def clocked(time: str) -> list[Message]:
    return [system(f"Current time is {time}.\n{words(200)}"), user("well?")]


@pytest.mark.parametrize("client", [ONE, NOBODY], ids=["named", "unnamed"])
def test_no_older_turn_comes_back_from_a_file(client: Client, unkept: Unkept) -> None:
    """In a process that forgot neither, and in the next one."""
    chats = Written()
    chats.say(TALK, "the older thought", client)
    assert "the older thought" in chats.text(client)
    unkept(chats, TALK, client)
    assert "the older thought" not in chats.text(client)
    chats.read_slots()
    assert "the older thought" not in chats.text(client)
    chats.restart()
    assert "the older thought" not in chats.text(client)


@pytest.mark.parametrize("client", [ONE, NOBODY], ids=["named", "unnamed"])
def test_what_memory_did_not_know_is_hidden_all_the_same(
    client: Client, unkept: Unkept
) -> None:
    """It had left memory, or its file was not open yet, when it was replaced."""
    chats = Written()
    chats.say(TALK, "the older thought", client)
    chats.forget_words()
    unkept(chats, TALK, client)
    chats.read_slots()
    assert "the older thought" not in chats.text(client)
    chats.restart()
    assert "the older thought" not in chats.text(client)


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_tries_that_look_alike_none_is_put_back(order: int) -> None:
    """The second may be a sub-agent's: nothing tells which of them goes on."""
    chats = Written()
    for thought in ("the older thought", "the newer thought"):
        chats.say(TALK, thought)
    assert "thought" not in chats.text()
    chats.restart(order=order)
    assert "thought" not in chats.text()


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_try_at_another_time_is_no_later_one_s_stand_in(*, is_loaded: bool) -> None:
    """Though its file was not written: its mark is there."""
    chats = Written()
    chats.say(clocked("10:00"), "the older thought")
    chats.say(clocked("10:01"), "the newer thought")
    if not is_loaded:
        chats.slots.pop()
    for _ in range(2):
        at_last = [*clocked("10:02"), assistant("Done."), user("go on")]
        assert "thought" not in chats.text(goes_on=at_last)
        chats.restart()


def on(branch: str, time: str) -> list[Message]:
    clock = f"Current time is {time}.\n{words(200)}"
    status = "gitStatus: This is the git status at the start of the conversation."
    status += f"\n\nCurrent branch: {branch}\n\nStatus:\nM a.py"
    return [system(f"{clock}\n\n{status}\n\nBe brief."), user("well?")]


@pytest.mark.parametrize("at", [clocked, lambda time: on(BRANCHES[time], time)])
def test_what_comes_back_does_not_tell_which_of_two_tries_is_meant(
    at: Callable[[str], list[Message]],
) -> None:
    """A clock to the very time of the one that was replaced, a branch to its own."""
    chats = Written()
    for time in ("10:00", "10:01"):
        chats.say(at(time), f"the thought of {time}")
    for time in ("10:00", "10:01", "10:02"):
        goes_on = [*at(time), assistant("Done."), user("go on")]
        assert "thought" not in chats.text(goes_on=goes_on)


@pytest.mark.parametrize("missing", [0, 1, None])
def test_who_asks_tells_which_of_two_turns_is_meant(missing: int | None) -> None:
    """A gateway names one session for all; no turn stands in for one that is lost."""
    chats = Written()

    def talk(sender: str, time: str) -> list[Message]:
        block = json.dumps({"sender_id": sender})
        told = f"Sender (untrusted metadata):\n```json\n{block}\n```\n\n"
        return [system(f"Current time is {time}.\n{words(200)}"), user(f"{told}well?")]

    senders = ("alice", "bob")
    for sender in senders:
        chats.say(talk(sender, "10:00"), f"the thought about {sender}")
    if missing is not None:
        chats.slots.pop(missing)
        chats.restart()
    for number, sender in enumerate(senders):
        goes_on = [*talk(sender, "10:02"), assistant("Done."), user("go on")]
        text = chats.text(goes_on=goes_on)
        assert (f"the thought about {sender}" in text) is (number != missing)
        assert f"the thought about {senders[1 - number]}" not in text


def test_an_older_try_does_not_stand_in_for_a_newer_one_that_was_not_written() -> None:
    chats = Written()
    chats.say(TALK, "the older thought")
    chats.say(TALK, "the newer thought")
    chats.slots.pop()
    chats.read_slots()
    for _ in range(2):
        assert "thought" not in chats.text()
        chats.restart()


def test_of_tries_of_nobody_in_particular_none_is_put_back() -> None:
    """Of one, or of two people: which of the two, nobody knows, in no process."""
    for missing in (0, 1, None):
        chats = Written()
        for thought in ("the older thought", "the newer thought"):
            chats.say(TALK, thought, NOBODY)
        assert "thought" not in chats.text(NOBODY)
        if missing is not None:
            chats.slots.pop(missing)
        chats.restart()
        assert "thought" not in chats.text(NOBODY)


def test_the_same_words_said_again_are_put_back() -> None:
    """Two people who were told the same, to the token."""
    chats = Written()
    for _ in range(2):
        chats.say(TALK, "the one thought", NOBODY)
    assert "the one thought" in chats.text(NOBODY)
    chats.restart()
    assert "the one thought" in chats.text(NOBODY)


@pytest.mark.parametrize("client", [ONE, NOBODY], ids=["named", "unnamed"])
def test_what_is_said_after_an_answer_that_broke_off_is_put_back(
    client: Client,
) -> None:
    """Its client asked again, and was shown all of it."""
    chats = Written()
    chats.break_off(TALK, client)
    chats.say(TALK, "the newest thought", client)
    for _ in range(2):
        assert ("the newest thought" in chats.text(client)) is (client is ONE)
        chats.restart()


@pytest.mark.parametrize("is_stopped", [True, False])
@pytest.mark.parametrize("client", [ONE, NOBODY], ids=["named", "unnamed"])
def test_what_is_said_after_a_cut_answer_that_looks_alike_is_not(
    client: Client, *, is_stopped: bool
) -> None:
    """It was cut by a stop string, or stopped by its client, who may go on from it."""
    chats = Written()
    if is_stopped:
        shown = conversation_memory.AssistantOutput("Done.", "", (), ())
        chats.memory.note_unkept(chats.ask(TALK, client).pending_turn, shown)
        chats.write_marks()
    else:
        chats.cut(TALK, client)
    chats.say(TALK, "the newest thought", client)
    for _ in range(2):
        assert "thought" not in chats.text(client)
        chats.restart()


def test_chats_of_equal_words_are_not_told_apart_by_their_clocks() -> None:
    """Without session ids: one goes on when the clock says the time of the other."""
    chats = Written()
    for time in ("10:00", "10:01"):
        chats.say(clocked(time), f"the thought of {time}", NOBODY)
    for _ in range(2):
        for time in ("10:00", "10:01"):
            goes_on = [*clocked(time), assistant("Done."), user("go on")]
            assert "thought" not in chats.text(NOBODY, goes_on)
        chats.restart()


def test_a_thread_that_is_known_by_its_calls_keeps_no_older_try(
    unkept: Unkept,
) -> None:
    """Its client names no session, and its clock has moved."""
    chats = Written()

    def at(time: str) -> list[Message]:
        return [*clocked(time), assistant("", CALL), result("x", CALL.id)]

    chats.turn(clocked("10:00"), Said("", "a look", (CALL,)), NOBODY)
    chats.say(at("10:01"), "the older thought", NOBODY)
    known = chats.text(NOBODY, [*at("10:02"), assistant("Done."), user("go on")])
    assert "the older thought" in known
    unkept(chats, at("10:03"), NOBODY)
    for _ in range(2):
        goes_on = [*at("10:04"), assistant("Done."), user("go on")]
        assert "the older thought" not in chats.text(NOBODY, goes_on)
        chats.restart()


@pytest.mark.parametrize("client", [ONE, NOBODY], ids=["named", "unnamed"])
def test_while_an_answer_is_given_no_older_one_is_put_back(client: Client) -> None:
    """Its client may be gone already, and go on from a part that looks alike."""
    chats = Written()
    chats.say(TALK, "the older thought", client)
    pending_turn = chats.ask(TALK, client).pending_turn
    chats.memory.answer_begun(pending_turn)
    assert "thought" not in chats.text(client)
    chats.memory.answer_ended(pending_turn)
    assert "the older thought" in chats.text(client)


def test_no_other_session_s_turn_stands_in_for_one_that_is_lost() -> None:
    """The session's own mark says that it was shown something else."""
    chats = Written()
    chats.say(clocked("10:01"), "the other session's thought", TWO)
    chats.say(clocked("10:00"), "the lost thought", ONE)
    chats.slots.pop()
    chats.restart()
    goes_on = [*clocked("10:01"), assistant("Done."), user("go on")]
    assert "thought" not in chats.text(ONE, goes_on)
    assert "thought" not in chats.text(Client("three"), goes_on)


def test_a_cut_answer_is_lent_no_other_session_s_thinking() -> None:
    """The very same prompt was answered in the same words elsewhere, and kept."""
    chats = Written()
    chats.say(TALK, "the other session's thought", TWO)
    assert "the other session's thought" in chats.text(ONE)
    chats.cut(TALK, ONE)
    for _ in range(2):
        # The other one may be a copy, whose client goes on from what was cut.
        assert "thought" not in chats.text(ONE)
        assert "thought" not in chats.text(TWO)
        chats.restart()


@pytest.mark.parametrize("clients", [(ONE, TWO), (NOBODY, NOBODY)])
def test_a_newer_turn_of_another_is_not_what_was_shown(
    clients: tuple[Client, Client], unkept: Unkept
) -> None:
    """The same prompt: one was shown what is not kept, the other the same words."""
    chats = Written()
    unkept(chats, TALK, clients[0])
    chats.say(TALK, "the other's thought", clients[1])
    for _ in range(2):
        assert "thought" not in chats.text(clients[0])
        chats.restart()


def test_marks_outlive_a_clearing_that_leaves_the_slots(unkept: Unkept) -> None:
    """They hide what stands in them."""
    chats = Written()
    chats.say(TALK, "the older thought")
    unkept(chats, TALK, ONE)
    chats.memory.forget(None)
    chats.read_slots()
    assert "the older thought" not in chats.text()


def test_a_process_is_told_what_another_one_has_shown(unkept: Unkept) -> None:
    """Both have read the older turn."""
    chats, other = Written(), Written()
    chats.say(TALK, "the older thought")
    other.log, other.slots = chats.log, chats.slots
    other.restart()
    assert "the older thought" in other.text()
    unkept(chats, TALK, ONE)
    other.memory.tombstones.learn(chats.log)
    assert "the older thought" not in other.text()


def test_a_turn_is_known_by_its_calls_though_a_later_one_was_cut() -> None:
    """Ids say which of the tries a client goes on from."""
    chats = Written()
    chats.say(TALK, "the older thought", ONE, (CALL,))
    chats.cut(TALK)
    goes_on = [*TALK, assistant("Done.", CALL), result("x", CALL.id), user("go on")]
    for _ in range(2):
        assert "the older thought" in chats.text(ONE, goes_on)
        chats.restart()


def test_what_says_no_time_is_known_until_something_is_shown() -> None:
    """Turns of files that were written before there were times."""
    chats = Written()
    chats.say(TALK, "the older thought")
    kept, canonical = chats.slots[0]
    told = dict(kept[0])  # type: ignore[call-overload]
    told["said"] = {k: v for k, v in told["said"].items() if k != "time"}
    chats.slots[0] = ([told], canonical)
    chats.log.clear()
    chats.restart()
    assert "the older thought" in chats.text()
    chats.cut(TALK)
    assert "the older thought" not in chats.text()


@pytest.mark.parametrize("is_all", [True, False])
def test_what_ends_behind_a_forgetting_hides_what_a_file_has(*, is_all: bool) -> None:
    """Memory was cleared and the disk was kept: a later try was shown all the same."""
    chats = Written()
    chats.say(TALK, "the older thought")
    later = chats.ask(TALK, ONE)
    chats.memory.forget(None if is_all else ForgetFilter("one", "k"))
    chats.answer(later, Said("Done.", "the newer thought"))
    chats.write_marks()
    chats.restart()
    assert "thought" not in chats.text()


def test_no_two_sessions_have_one_name() -> None:
    """Sessions that clients call as those without a name are called."""
    chats = Written()
    names = ("implicit-x", "named implicit-x", "named named implicit-x", "implicit-y")
    asked = [chats.ask(TALK, Client(name)) for name in names]
    sessions = {prompt.pending_turn.record.conversation.session for prompt in asked}
    assert len(sessions) == len(names)


def test_a_copied_chat_whose_clock_has_moved_is_lent_no_other_s_thought() -> None:
    """It stands now where another chat of equal words was answered."""
    chats = Written()
    chats.say(clocked("11:20"), "the other's thought", TWO)
    goes_on = [*clocked("11:20"), assistant("Done."), user("go on")]
    assert "thought" in chats.text(Client("copy"), goes_on)
    chats.say(clocked("08:00"), "the thought that was copied", ONE)
    for _ in range(2):
        assert "thought" not in chats.text(Client("copy"), goes_on)
        chats.restart()


def test_a_copied_chat_goes_on_from_the_try_that_it_was_copied_with() -> None:
    """Its client names another session, and has the last answer given again."""
    chats = Written()
    chats.say(TALK, "the first thought", ONE)
    assert "the first thought" in chats.text(TWO)
    chats.say(TALK, "the second thought", TWO)
    for _ in range(2):
        for client in (ONE, TWO):
            assert "thought" not in chats.text(client)
        chats.restart()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_further_choice_is_not_taken_for_an_older_turn(*, is_whole: bool) -> None:
    """It is not kept, and its client may go on from it; whole, or broken off."""
    chats = Written()
    chats.say(TALK, "the older thought")
    others = (visible_hash("Done.", ()) or "",)
    text, ids = ("Another.", chats.sample("Another.")) if is_whole else ("", ())
    shown = conversation_memory.AssistantOutput(text, "", (), ids, others)
    pending_turn = chats.ask(TALK, ONE).pending_turn
    if is_whole:
        chats.memory.commit(pending_turn, shown)
    else:
        chats.memory.note_unkept(pending_turn, shown)
    chats.write_marks()
    for _ in range(2):
        assert "thought" not in chats.text()
        chats.restart()
