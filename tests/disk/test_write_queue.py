"""What is written when: after a rest, or when it has grown long."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from sidecar.core.conversation import ForgetFilter
from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.slot_index import SlotIndex
from sidecar.kv.disk.write_queue import PendingWrite, PendingWrites, WriteQueue
from testkit.sequences import owned

MINE = owned("s", salt="mine")
CONVERSATIONS = {name: owned(name) for name in "abcd"}


def ids(*values: int) -> ModelIds:
    return ModelIds(values)


def test_a_conversation_rests_before_it_is_due() -> None:
    now = [100.0]
    due = PendingWrites(clock=lambda: now[0])
    due.note(ids(1, 2), MINE)
    now[0] += 19
    assert due.take(20) == []
    now[0] += 1
    assert [d.ids for d in due.take(20)] == [(1, 2)]
    assert due.take(0) == []


def test_what_goes_on_is_not_due_before_it_rests_again() -> None:
    now = [0.0]
    due = PendingWrites(clock=lambda: now[0])
    due.note(ids(1, 2), MINE)
    now[0] = 19
    due.note(ids(1, 2, 3), MINE)
    now[0] = 38
    assert due.take(20) == []
    now[0] = 39
    assert [d.ids for d in due.take(20)] == [(1, 2, 3)]


def test_siblings_and_other_keys_are_due_by_themselves() -> None:
    due = PendingWrites(clock=lambda: 0.0)
    due.note(ids(1, 2), MINE)
    due.note(ids(1, 3), MINE)
    due.note(ids(1, 2, 3), owned("s", salt="another"))
    assert len(due.take(0)) == 3


def test_what_another_went_on_from_is_due_again_where_that_is_forgotten() -> None:
    due = PendingWrites(clock=lambda: 0.0)
    for length, session in ((1, "a"), (2, "b"), (3, "c"), (4, "c"), (5, "d")):
        due.note(ids(*range(length)), owned(session))
    assert len(due) == 1
    due.forget(ForgetFilter("d"))
    assert [(d.conversation, len(d.ids)) for d in due.waiting()] == [
        (CONVERSATIONS["c"], 4)
    ]
    due.forget(ForgetFilter("b"))
    due.forget(ForgetFilter("c"))
    assert [(d.conversation, len(d.ids)) for d in due.waiting()] == [
        (CONVERSATIONS["a"], 1)
    ]
    due.forget(ForgetFilter("a"))
    assert due.waiting() == []


def test_who_is_dropped_is_dropped_once() -> None:
    due = PendingWrites(clock=lambda: 0.0)
    due.note(ids(1), MINE)
    (one,) = due.waiting()
    due.forget(ForgetFilter("another"))
    assert due.drop(one)
    assert not due.drop(one)


def test_what_others_said_is_written_where_its_end_was_forgotten_meanwhile() -> None:
    written: list[str] = []
    gone: list[object] = []

    def write(due: PendingWrite, *, is_last: bool) -> None:
        written.append(due.conversation.session)
        gone.append(CONVERSATIONS["b"])  # while it is being written

    store: Any = SimpleNamespace(is_current=lambda owner: owner not in gone)
    now: Any = SimpleNamespace(submit=lambda _urgency, act: (act(), Future())[1])
    machine: Any = SimpleNamespace(thread=now, is_idle=lambda: True)
    settings: Any = SimpleNamespace(quiet_s=0.0)
    queue = WriteQueue(store, SlotIndex(), machine, settings, write, lambda: None)
    for length, session in ((1, "a"), (2, "b"), (3, "c")):
        queue.due.note(ids(*range(length)), owned(session))
    queue.poll()
    assert written == ["c"], "nobody forgot that"
    for length, session in ((1, "a"), (2, "b")):
        queue.due.note(ids(*range(length)), owned(session))
    queue.poll()
    assert written == ["c", "b", "a"]


def test_the_list_has_a_bound() -> None:
    due = PendingWrites(clock=lambda: 0.0)
    for number in range(1000):
        due.note(ids(number), MINE)
    assert len(due) == 64
