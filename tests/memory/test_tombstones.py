"""Marks hide what is older, whatever was forgotten, and in whatever order they come."""

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.conversation import IMPLICIT, Conversation
from sidecar.memory.tombstones import (
    Context,
    PlaceKeys,
    Tombstones,
    place_keys,
)

NAMED = Conversation("key", "s", "thread")
OTHER = Conversation("key", "other", "thread")
NOBODY = Conversation("key", f"{IMPLICIT}1", "thread")
DIGEST, ANOTHER = "a" * 32, "b" * 32


def keys(
    conversation: Conversation = NAMED,
    visible: str = "v",
    literal: str = "l",
    sender: str = "Alice",
    context: str = "c",
) -> PlaceKeys:
    return place_keys(visible, Context(context, literal, sender, sender), conversation)


def marks(maximum: int = 100) -> Tombstones:
    counter = itertools.count(10, 10)
    return Tombstones(maximum, lambda: next(counter))


def break_off(known: Tombstones, names: str) -> int:
    """An answer breaks off at each place; a time before all of them."""
    before = known.now()
    for name in names:
        known.bury(keys(context=name).broken_off)
    return before


def test_time_is_later_than_all_that_was_seen() -> None:
    """The clock of another process, or of a file, may be ahead."""
    known = Tombstones(clock=lambda: 100)
    assert known.now() == 100
    assert known.now() == 101
    known.see(5000)
    assert known.now() == 5001
    for never in (-1, 1 << 61):
        with pytest.raises(ValueError, match="nanoseconds"):
            known.see(never)
    known.learn([f"{9000:016x} {'1' * 32} {'0' * 32}"])
    assert known.now() == 9001


def test_a_named_session_hides_its_own_behind_whatever_clock() -> None:
    known = marks()
    before = known.now()
    known.bury(keys().broken_off)
    assert known.hides(keys(literal="another clock"), before)
    assert not known.hides(keys(), known.now())
    assert not known.hides(keys(OTHER), before)
    assert known.has_broken_off(keys())
    assert not known.has_broken_off(keys(OTHER))


def test_nobody_hides_its_thread_and_the_very_same_prompt() -> None:
    known = marks()
    before = known.now()
    known.bury(keys(NOBODY).broken_off)
    stranger = Conversation("key", f"{IMPLICIT}2", "another")
    assert known.hides(keys(NOBODY, literal="another clock"), before)
    assert known.hides(keys(stranger), before)
    assert not known.hides(keys(stranger, literal="another clock"), before)
    assert not known.hides(keys(Conversation("key 2", f"{IMPLICIT}1", "t")), before)


def test_what_is_not_kept_is_another_turn_than_all_that_are() -> None:
    """Those that were shown before it, and those that are shown later."""
    for is_first in (True, False):
        known = marks()
        if is_first:
            known.shown_unkept(keys())
        known.shown(keys(), known.now(), DIGEST)
        if not is_first:
            known.shown_unkept(keys())
        for key in (keys().conversation, keys().identity, keys().prompt):
            assert not known.is_only(key, DIGEST)
        assert known.is_only(keys(visible="w").conversation, DIGEST)
        assert known.is_only(keys(OTHER).conversation, DIGEST)


def test_answers_that_broke_off_hide_what_is_older() -> None:
    known = marks()
    before = known.now()
    known.bury(keys(visible="").broken_off)
    assert known.hides(keys(visible="whatever"), before)
    assert not known.hides(keys(visible="whatever"), known.now())


@pytest.mark.parametrize("other", [NAMED, OTHER], ids=["itself", "another"])
def test_a_place_has_one_turn_or_none(other: Conversation) -> None:
    """Another try, or another conversation's: whichever came last."""
    known = marks()
    assert known.is_only(keys().prompt, DIGEST)
    for conversation in (NAMED, other):
        known.shown(keys(conversation), known.now(), DIGEST)
    assert known.is_only(keys().prompt, DIGEST)
    assert not known.is_only(keys().prompt, ANOTHER)
    for digest in (ANOTHER, DIGEST):
        known.shown(keys(other), known.now(), digest)
        assert not any(known.is_only(keys().prompt, each) for each in (DIGEST, ANOTHER))
    assert known.is_only(keys().conversation, DIGEST) is (other is OTHER)


def test_a_conversation_s_place_has_all_clocks() -> None:
    """A try at another time is another prompt, and the same place."""
    for conversation, other in ((NAMED, OTHER), (NOBODY, OTHER)):
        known = marks()
        known.shown(keys(conversation), known.now(), DIGEST)
        known.shown(keys(conversation, literal="later"), known.now(), ANOTHER)
        assert known.is_only(keys(conversation).prompt, DIGEST)
        assert not known.is_only(keys(conversation).conversation, DIGEST)
        assert not known.is_only(keys(conversation).identity, DIGEST)
        assert known.is_only(keys(other).conversation, DIGEST)


def test_who_asks_tells_which_turn_is_meant() -> None:
    known = marks()
    known.shown(keys(), known.now(), DIGEST)
    known.shown(keys(literal="m", sender="Bob"), known.now(), ANOTHER)
    assert not known.is_only(keys().conversation, DIGEST)
    assert known.is_only(keys().identity, DIGEST)
    assert known.is_only(keys(sender="Bob").identity, ANOTHER)


def test_what_is_written_again_hides_all_that_was_merged() -> None:
    known, other = marks(maximum=2), marks()
    known.keep_log()
    before = break_off(known, "vwx")
    known.logged(known.unlogged())
    known.write_again()
    other.learn(known.unlogged())
    assert all(other.hides(keys(context=visible), before) for visible in "vwx")


def test_an_answer_that_is_being_given_hides_what_is_there() -> None:
    """As long as any is, and no longer."""
    known = marks()
    known.shown(keys(), known.now(), DIGEST)
    for _ in range(2):
        known.answer_begun(keys())
    for is_over in (False, True):
        assert known.hides(keys(visible="w", literal="later"), known.now())
        assert known.has_broken_off(keys())
        assert not known.hides(keys(OTHER), known.now())
        assert known.unlogged() == []
        known.answer_ended(keys())
        assert known.hides(keys(), known.now()) is not is_over
    assert not known.has_broken_off(keys())


def test_a_mark_of_several_hides_them_when_it_goes() -> None:
    """The last of them has the mark's own time."""
    known = marks(maximum=9)
    for digest in (DIGEST, ANOTHER):
        last = known.now()
        known.shown(keys(), last, digest)
    for number in range(9):
        known.bury([str(number) * 32])
    assert known.is_only(keys().conversation, ANOTHER)
    assert known.hides(keys(), last)


def test_the_oldest_of_too_many_hide_all_that_is_as_old() -> None:
    """Nothing that was hidden is seen again, though its mark is gone."""
    known = marks(maximum=3)
    before = break_off(known, "vwxyz")
    assert len(known) == 3
    assert known.hides(keys(context="v"), before)
    assert known.hides(keys(context="never shown"), before)
    assert not known.hides(keys(context="never shown"), known.now())


def test_the_newest_marks_are_kept_one_by_one() -> None:
    """What is younger than the one that went is not hidden by it."""
    known = marks(maximum=2)
    break_off(known, "vwv")
    between = known.now()
    known.bury(keys(context="x").broken_off)  # and w's goes
    assert known.hides(keys(context="v"), between - 15)
    assert not known.hides(keys(context="v"), between)
    assert not known.hides(keys(context="y"), between)


def test_what_no_file_takes_is_merged_as_well() -> None:
    known, other = marks(maximum=3), marks()
    known.keep_log()
    before = break_off(known, "vwxyz")
    assert len(known.unlogged()) <= 3
    other.learn(known.unlogged())
    assert all(other.hides(keys(context=visible), before) for visible in "vwxyz")


def test_lines_are_written_until_they_are() -> None:
    """What is marked while they are being written is written next."""
    known = marks()
    known.bury(keys().broken_off)
    assert known.unlogged() == []  # nobody has asked for a log
    known.keep_log()
    known.bury(keys().broken_off)
    first = known.unlogged()
    assert len(first) == 1
    known.bury(keys().broken_off)
    known.bury(keys(OTHER, context="d").broken_off)
    known.logged(first)
    assert len(known.unlogged()) == 2
    known.logged(known.unlogged())
    assert known.unlogged() == []


def test_what_was_learnt_is_not_written_again() -> None:
    known, other = marks(), marks()
    known.keep_log()
    other.keep_log()
    known.bury(keys().broken_off)
    other.learn(known.unlogged())
    assert other.unlogged() == []
    assert other.hides(keys(), 1)


def test_what_is_no_line_is_passed_over() -> None:
    known = marks()
    line = f"{7:016x} {keys().broken_off[0]} {'0' * 32}"
    known.learn(["", "x", line[:-1], f"{line}0", f"{line} {line}", line.upper() + "G"])
    known.learn([f"f{line[1:]}"])  # no clock says that: it would hide all for ever
    assert len(known) == 0
    known.learn([line])
    assert len(known) == 1


def test_a_file_that_is_written_anew_says_all() -> None:
    known, other = marks(maximum=2), marks()
    before = break_off(known, "vwx")
    other.learn(known.lines())
    assert all(other.hides(keys(context=visible), before) for visible in "vwx")
    assert other.hides(keys(context="never shown"), before)


def test_all_is_forgotten() -> None:
    known = marks(maximum=1)
    known.keep_log()
    break_off(known, "vw")
    before = known.now()
    known.clear()
    assert (len(known), known.unlogged()) == (0, [])
    assert known.now() > before
    assert not known.hides(keys(), 1)


MARKS = st.lists(
    st.tuples(
        st.integers(1, 5), st.sampled_from("ab"), st.sampled_from([NAMED, OTHER])
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(MARKS, st.integers(1, 20), st.randoms())
def test_lines_come_in_any_order(
    shown: list[tuple[int, str, Conversation]], maximum: int, random: Random
) -> None:
    """Those of several processes: what was shown twice is never seen as one."""
    written, read = marks(), marks(maximum)
    written.keep_log()
    lines = []
    for time, digest, conversation in shown:
        written.shown(keys(conversation), time, digest * 32)
        lines += written.unlogged()
    random.shuffle(lines)
    read.learn(lines)
    for conversation in (NAMED, OTHER):
        place = keys(conversation)
        mine = [(time, d) for time, d, other in shown if other == conversation]
        for key, all_of in (
            (place.conversation, mine),
            (place.prompt, [(time, d) for time, d, _ in shown]),
        ):
            digests = {digest for _, digest in all_of}
            for digest in digests:
                is_hidden = read.hides(place, max(time for time, _ in all_of))
                is_only = read.is_only(key, digest * 32)
                assert is_only is (len(digests) == 1) or is_hidden
