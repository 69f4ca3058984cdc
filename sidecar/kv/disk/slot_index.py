"""
Which prompts are on the disk, found without reading their KV.

A chain of slots is a path of ids, as in the tree of what is in memory: a slot goes on
from its parent's end, or from a place inside it. Ids are kept packed, four bytes each.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sidecar.kv.disk.slot import Slot

_HEAD = 16  # ids by which most beginnings differ


@dataclass(frozen=True, slots=True)
class DiskMatch:
    """
    The longest path that a sequence shares with the slots.

    Args:
        chain: from a beginning on; of each but the last, the part up to the next one's
            `at` is used. depth: tokens shared.
    """

    chain: tuple[Slot, ...] = ()
    depth: int = 0

    def at_most(self, depth: int) -> "DiskMatch":
        """The part of it that is no deeper."""
        depth = min(depth, self.depth)
        return DiskMatch(tuple(s for s in self.chain if s.at < depth), depth)

    def bytes_behind(self, depth: int) -> int:
        """Bytes of the files that it lies in from a depth on."""
        return sum(slot.num_bytes for slot in self.chain if slot.end > depth)


class SlotIndex:
    """The slots of one model. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._below: dict[int | None, list[Slot]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self) -> list[Slot]:
        """All of them, ascending."""
        with self._lock:
            return [self._slots[n] for n in sorted(self._slots)]

    def get(self, number: int) -> Slot | None:
        """The slot that has a number."""
        return self._slots.get(number)

    def add(self, slot: Slot) -> bool:
        """Take a slot in; False: its parent is not there."""
        with self._lock:
            if slot.parent is not None and not _fits(slot, self._slots):
                return False
            self._remove(slot.number)
            self._slots[slot.number] = slot
            self._below.setdefault(_above(slot), []).append(slot)
        return True

    def remove(self, number: int) -> None:
        """Forget a slot, and those that go on from it."""
        with self._lock:
            self._remove(number)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._slots.clear()
            self._below.clear()

    def children(self, slot: Slot) -> list[Slot]:
        """Those that go on from it."""
        with self._lock:
            return list(self._below.get(slot.number, ()))

    def match(self, ids: Sequence[int], salt: str) -> DiskMatch:
        """The longest path of slots that a sequence shares."""
        return max(self._matches(ids, salt), key=_depth, default=DiskMatch())

    def match_at_end(self, ids: Sequence[int], salt: str, maximum: int) -> DiskMatch:
        """
        The longest path that ends where a slot does: there all layers have a state.

        It need not lie on the longest path: a slot that replaces another stands beside
        it until that is deleted, and has no state where the other one ends.

        Args:
            maximum: tokens, at most.
        """
        ends = (
            match
            for match in self._matches(ids, salt)
            if match.chain[-1].is_end and match.chain[-1].end == match.depth <= maximum
        )
        return max(ends, key=_depth, default=DiskMatch())

    def _matches(self, ids: Sequence[int], salt: str) -> list[DiskMatch]:
        """Of each slot that the ids reach, the path to where they leave it."""
        found = list[DiskMatch]()
        if not self._slots or not ids:
            return found
        asked = np.asarray(ids, np.int64)
        with self._lock:
            roots = self._below.get(None, ())
            starts = (s for s in roots if s.salt == salt and _begins(s, asked))
            todo: list[tuple[Slot, tuple[Slot, ...]]] = [(s, ()) for s in starts]
            while todo:
                slot, before = todo.pop()
                depth = slot.at + _common(slot.ids, asked[slot.at : slot.end])
                chain = (*before, slot)
                if depth > slot.at:
                    found.append(DiskMatch(chain, depth))
                below = self._below.get(slot.number, ())
                todo += [(child, chain) for child in below if child.at <= depth]
        return found

    def _remove(self, number: int) -> None:
        todo = [number]
        while todo:
            slot = self._slots.pop(todo.pop(), None)
            if slot is None:
                continue
            beside = self._below.get(_above(slot), [])
            if slot in beside:  # else its parent is gone as well
                beside.remove(slot)
            todo += [child.number for child in self._below.pop(slot.number, ())]


def _depth(match: DiskMatch) -> int:
    return match.depth


def _above(slot: Slot) -> int | None:
    return slot.parent[0] if slot.parent else None


def _fits(slot: Slot, slots: Mapping[int, Slot]) -> bool:
    assert slot.parent is not None
    parent = slots.get(slot.parent[0])
    return (
        parent is not None
        and slot.parent == (parent.number, parent.uid)
        and parent.at < slot.at <= parent.end
        and parent.salt == slot.salt
    )


def _common(run: np.ndarray, asked: np.ndarray) -> int:
    size = min(len(run), len(asked))
    differs = run[:size] != asked[:size]
    return int(differs.argmax()) if differs.any() else size


def _begins(slot: Slot, asked: np.ndarray) -> bool:
    """Whether the first ids are the same; the others are compared then."""
    size = min(_HEAD, slot.length, len(asked))
    return bool((slot.ids[:size] == asked[:size]).all())
