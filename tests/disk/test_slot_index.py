"""Paths of slots are found as a search of all of them finds them."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.kv.disk.slot import STATE_GONE, WITH_STATE, Slot
from sidecar.kv.disk.slot_index import DiskMatch, SlotIndex

HEAD = [5] * 16  # slots that begin otherwise are passed over
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class Written(NamedTuple):
    """A slot, and all ids from the beginning of a prompt to its end."""

    slot: Slot
    path: list[int]


def slot(
    number: int, parent: Slot | None, at: int, ids: list[int], state: str = WITH_STATE
) -> Slot:
    """A slot of these ids, which has no files."""
    return Slot(
        number,
        f"uid {number}",
        (parent.number, parent.uid) if parent else None,
        at,
        at + len(ids),
        np.array(ids, np.int32),
        np.empty(0, np.uint32),
        {"salt": "", "state": state},
        len(ids),
        0.0,
    )


@st.composite
def many_written(draw: st.DrawFn) -> list[Written]:
    """Slots of few different ids: many lie beside each other."""
    found = list[Written]()
    for number in range(draw(st.integers(1, 8))):
        above = draw(st.sampled_from([None, *found]))
        at = draw(st.integers(above.slot.at + 1, above.slot.end)) if above else 0
        ids = draw(IDS) if above else [*HEAD, *draw(IDS)]
        state = draw(st.sampled_from([WITH_STATE, STATE_GONE]))
        made = slot(number, above.slot if above else None, at, ids, state)
        found.append(Written(made, [*(above.path[:at] if above else []), *ids]))
    return found


def shared(path: list[int], asked: list[int]) -> int:
    """How many ids both begin with."""
    same = (a == b for a, b in zip(path, asked, strict=False))
    return sum(itertools.takewhile(bool, same))


def path_of(match: DiskMatch) -> list[int]:
    """The ids that a chain of slots stands for."""
    if not match.chain:
        return []
    ends = [s.at for s in match.chain[1:]] + [match.depth]
    parts = zip(match.chain, ends, strict=True)
    return [i for s, end in parts for i in s.ids[: end - s.at].tolist()]


@given(many_written(), IDS, IDS, st.integers(0, 30))
def test_any_path(
    written: list[Written], begun: list[int], more: list[int], maximum: int
) -> None:
    index, asked = SlotIndex(), [*HEAD, *begun, *more]
    assert all(index.add(each.slot) for each in written)
    longest = index.match(asked, "")
    assert longest.depth == max(shared(each.path, asked) for each in written)
    assert path_of(longest) == asked[: longest.depth]
    at_end = index.match_at_end(asked, "", maximum)
    ends = [
        len(each.path)
        for each in written
        if each.slot.is_end and asked[: len(each.path)] == each.path
    ]
    assert at_end.depth == max([0, *(end for end in ends if end <= maximum)])
    assert path_of(at_end) == asked[: at_end.depth]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_longer_slot_hides_no_end(*, is_first: bool) -> None:
    """A process that is killed leaves a slot beside the longer one of its tokens."""
    index = SlotIndex()
    ended, longer = [*HEAD, 1], [*HEAD, 1, 2, 3]
    index.add(slot(1, None, 0, longer if is_first else ended))
    index.add(slot(2, None, 0, ended if is_first else longer))
    assert index.match_at_end([*ended, 9], "", 17).depth == 17
    assert index.match_at_end([*longer, 9], "", 19).depth == 19
    assert index.match_at_end([*HEAD, 9], "", 16).depth == 0
