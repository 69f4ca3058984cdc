"""Finished prompts are found by their beginning, block by block, and leave in time."""

import time
from array import array
from collections.abc import Sequence

import pytest

from sidecar.core.conversation import Conversation
from sidecar.memory import lineage
from sidecar.memory.lineage import LineageIndex, LineageRecord, StoredSpan, pack
from sidecar.pipeline.reuse.prompt_ids import BLOCK_LEN

SCOPE = Conversation("key", "s", "thread")


def index(*, ttl_s: float = 0, use_blocks: bool = True) -> LineageIndex:
    return LineageIndex("model", ttl_s, use_blocks=use_blocks)


def record(ids: Sequence[int], conversation: Conversation = SCOPE) -> LineageRecord:
    return LineageRecord(array("I", ids), (), {}, conversation)


def blocks(*names: int) -> list[int]:
    """One block of ids for each name."""
    return [name * 1000 + i for name in names for i in range(BLOCK_LEN)]


def found(of: LineageIndex, ids: Sequence[int]) -> list[tuple[list[int], int]]:
    return [(list(r.canonical), n) for r, n in of.candidates(array("I", ids), SCOPE)]


@pytest.mark.parametrize("use_blocks", [True, False])
def test_the_deepest_common_beginning_comes_first(use_blocks: bool) -> None:
    """With the number of ids shared, counted to the id."""
    known = index(use_blocks=use_blocks)
    short, long = blocks(1, 2), [*blocks(1, 2, 3), 7, 8]
    for ids in (short, long, blocks(9)):
        known.add(record(ids))
    asked = [*blocks(1, 2, 3), 7, 9]
    assert found(known, asked) == [(long, 3 * BLOCK_LEN + 1), (short, 2 * BLOCK_LEN)]


@pytest.mark.parametrize("use_blocks", [True, False])
def test_no_record_is_found_by_another_key(use_blocks: bool) -> None:
    """It lends nothing there, and its words would stand in the other's drift report."""
    known = index(use_blocks=use_blocks)
    known.add(record(blocks(1, 2), Conversation("another", "s", "thread")))
    known.add(record(blocks(1, 2), Conversation(None, "s", "thread")))
    assert found(known, blocks(1, 2)) == []
    known.add(record(blocks(1), SCOPE))
    assert found(known, blocks(1, 2)) == [(blocks(1), BLOCK_LEN)]


@pytest.mark.parametrize("use_blocks", [True, False])
def test_less_than_a_block_is_no_match(use_blocks: bool) -> None:
    """Nor is an equal block behind a different one."""
    known = index(use_blocks=use_blocks)
    known.add(record(blocks(1, 2)))
    assert found(known, blocks(1)[:-1]) == []
    assert found(known, blocks(3, 2)) == []
    assert found(known, []) == []


def test_another_model_key_has_other_hashes() -> None:
    """The chain begins with it."""
    one, other = record(blocks(1)), record(blocks(1))
    LineageIndex("a", 0, use_blocks=True).add(one)
    LineageIndex("b", 0, use_blocks=True).add(other)
    assert one.block_hashes != other.block_hashes


def test_eight_candidates_are_enough() -> None:
    """The deepest ones."""
    known = index()
    for number in range(12):
        known.add(record(blocks(*range(number + 1))))
    lengths = [length for _, length in found(known, blocks(*range(20)))]
    assert lengths == [n * BLOCK_LEN for n in range(12, 4, -1)]


def test_an_equal_prompt_of_the_same_scope_is_kept_once() -> None:
    """Of another conversation it is another one."""
    known = index()
    for conversation in (SCOPE, SCOPE, Conversation("key", "s", "helper")):
        known.add(record(blocks(1, 2), conversation))
    assert len(known) == 2


def test_records_leave_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used first."""
    monkeypatch.setattr(lineage, "_MAX_RECORDS", 3)
    known = index()
    kept = [record(blocks(name)) for name in range(3)]
    for each in kept:
        known.add(each)
    known.touch(kept[0])
    known.add(record(blocks(3)))
    assert [bool(found(known, blocks(n))) for n in range(4)] == [
        True, False, True, True,
    ]  # fmt: skip
    monkeypatch.setattr(known, "_max_bytes", 3 * record(blocks(0)).num_bytes)
    known.add(record(blocks(4, 5)))
    assert [bool(found(known, blocks(n))) for n in range(5)] == [
        False, False, False, True, True,
    ]  # fmt: skip


def test_records_leave_when_their_time_is_over() -> None:
    """Counted from their last use."""
    known = index(ttl_s=60)
    old, used = record(blocks(1)), record(blocks(2))
    known.add(old)
    known.add(used)
    for each in (old, used):
        each.touched = time.monotonic() - 100
    known.touch(used)
    assert found(known, blocks(1)) == []
    assert found(known, blocks(2)) != []
    assert (len(known), used.hits) == (1, 1)


def test_touching_a_record_that_left_does_not_bring_it_back() -> None:
    """A request may hold it longer than the index."""
    known = index()
    gone = record(blocks(1))
    known.add(gone)
    known.forget(None)
    known.touch(gone)
    assert (len(known), found(known, blocks(1))) == (0, [])


def test_a_prompt_shorter_than_a_block_is_kept_and_never_found() -> None:
    """It would gain nothing."""
    known = index()
    known.add(record([1, 2, 3]))
    known.add(record([1, 2, 3]))
    assert found(known, [1, 2, 3]) == []


def test_hashes_are_chained_as_specified() -> None:
    """H_i = SHA-256(H_(i-1) and the ids, 4 bytes each, big end first)."""
    import hashlib

    ids = [*blocks(1, 2), 5]
    one = record(ids, Conversation(None, "s", "thread"))
    index().add(one)
    state = hashlib.sha256(b"model").digest()
    expected = []
    for start in (0, BLOCK_LEN):
        data = b"".join(i.to_bytes(4, "big") for i in ids[start : start + BLOCK_LEN])
        state = hashlib.sha256(state + data).digest()
        expected.append(int.from_bytes(state[:8], "big"))
    assert one.block_hashes.tolist() == expected


def test_blocks_with_the_same_records_share_their_list() -> None:
    """100k-token prompts have thousands of blocks; a list each would be megabytes."""
    known = index()
    known.add(record(blocks(1, 2, 3, 4)))
    known.add(record(blocks(1, 2, 3, 5)))
    assert len({id(holders) for holders in known._blocks.values()}) == 3


def test_what_is_removed_leaves_nothing_behind() -> None:
    known = index(ttl_s=1e-9)
    for last in (4, 5, 6):
        known.add(record(blocks(1, 2, 3, last)))
    found(known, blocks(9))
    assert len(known) == 0
    assert known._blocks == {}


def test_a_common_beginning_ends_where_ids_differ() -> None:
    """Also at an end, and at nothing."""
    one = record([1, 2, 3])
    for other, length in (([1, 2, 4], 2), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)):
        assert one.common_len(pack(tuple(other))) == length


@pytest.mark.parametrize("use_blocks", [True, False])
def test_a_record_outlives_those_that_shared_its_beginning(use_blocks: bool) -> None:
    """Ten sub-agents came and went over one system text."""
    known = index(ttl_s=60, use_blocks=use_blocks)
    main = record(blocks(1, 2, 3, 4, 5))
    known.add(main)
    for number in range(10):
        known.add(record(blocks(1, 2, 10 + number)))
    for each in list(known._records.values()):
        each.touched = time.monotonic() - 100
    known.touch(main)
    for asked in (blocks(1, 2, 3, 4, 5, 6), blocks(1, 2, 3, 9)):
        assert found(known, asked)[0][0] == blocks(1, 2, 3, 4, 5)
    assert len(known) == 1


def test_equal_prompts_of_others_do_not_push_a_threads_own_out() -> None:
    """Hundreds of sessions of one agent begin alike."""
    known = index()
    mine = record(blocks(1, 2, 3))
    known.add(mine)
    for number in range(200):
        known.add(record(blocks(1, 2, 3), Conversation("key", f"s{number}", "thread")))
    shared = known.candidates(array("I", blocks(1, 2, 4)), SCOPE)
    assert (mine, 2 * BLOCK_LEN) in shared
    assert len(shared) == 9  # its own, and eight of others


def test_a_thread_finds_its_last_eight() -> None:
    """The older ones are found by their blocks, if at all."""
    known = index()
    records = [record(blocks(1, number)) for number in range(2, 12)]
    for one in records:
        known.add(one)
    shared = known.candidates(array("I", blocks(1, 99)), SCOPE)
    assert [one for one, _ in shared] == records[:1:-1]


def test_long_values_count() -> None:
    """A megabyte of status in each record, behind some ids: the oldest leave."""
    known = LineageIndex("model", 0, use_blocks=True, max_bytes=10_000_000)
    for number in range(20):
        one = record(blocks(number))
        one.spans = (StoredSpan((0, 0, "git_status", 0), "x" * 1_000_000, 0),)
        known.add(one)
        assert known.num_bytes <= 10_000_000
    assert len(known) == 2
    known.forget(None)
    assert (len(known), known.num_bytes) == (0, 0)


def test_a_record_that_leaves_gives_its_bytes_back() -> None:
    """Replaced or expired, nothing is left of it."""
    known = index(ttl_s=0.001)
    for _ in range(5):
        known.add(record(blocks(1, 2)))
    assert len(known) == 1
    time.sleep(0.002)
    assert found(known, blocks(1)) == []
    assert (len(known), known.num_bytes) == (0, 0)


def test_what_was_sent_in_answered_messages_outlives_an_equal_prompt() -> None:
    """The model's turns may not be known any more when the prompt comes again."""
    lineage = LineageIndex("m", 0, use_blocks=True)
    key = (1, 0, "conversation_info", 0)
    ids = array("I", blocks(1, 2))
    for is_answered in (True, False, False):
        span = StoredSpan(key, "Ada", 5, was_sent_answered=is_answered, was_sent=True)
        lineage.add(LineageRecord(ids, (span,), {}, SCOPE))
    ((found_again, _),) = lineage.candidates(ids, SCOPE)
    assert found_again.sent_answered == {key}
