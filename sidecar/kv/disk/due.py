"""Which conversations are to be written to the disk, and since when they rest."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sidecar.core.forgetting import Whose
from sidecar.core.prompt import ModelIds
from sidecar.kv.prefix_tree import Owner

_MOST = 64  # conversations; the one that rests longest is written or not at all


@dataclass(frozen=True, slots=True)
class Due:
    """A path that a sequence left, when, and in which epoch of the store."""

    ids: ModelIds
    owner: Owner
    since: float
    epoch: int = 0


class DueList:
    """
    Ends of conversations that rest. Any thread.

    Args:
        epoch: of the store, now. clock: seconds. For tests.
    """

    def __init__(
        self,
        epoch: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch = epoch
        self._clock = clock
        self._lock = threading.Lock()
        self._due: list[Due] = []

    def __len__(self) -> int:
        return len(self._due)

    def note(self, ids: ModelIds, owner: Owner) -> None:
        """A sequence left this path; what it went on from is not an end any more."""
        new = Due(ids, owner, self._clock(), self._epoch())
        with self._lock:
            self._due = [old for old in self._due if not _goes_on(old, new)]
            self._due = [*self._due, new][-_MOST:]

    def take(self, quiet_s: float) -> list[Due]:
        """Those that have rested so long, taken off the list."""
        before = self._clock() - quiet_s
        with self._lock:
            taken = [due for due in self._due if due.since <= before]
            self._due = [due for due in self._due if due.since > before]
        return taken

    def waiting(self) -> list[Due]:
        """All that is on the list."""
        with self._lock:
            return list(self._due)

    def drop(self, due: Due) -> bool:
        """Take one off the list; False: it is not there any more."""
        with self._lock:
            is_there = due in self._due
            self._due = [other for other in self._due if other is not due]
        return is_there

    def forget(self, whose: Whose | None = None) -> None:
        """Forget all, or some conversations."""
        with self._lock:
            self._due = [
                due
                for due in self._due
                if whose is not None and not whose.covers(due.owner.scope)
            ]


def _goes_on(old: Due, new: Due) -> bool:
    size = len(old.ids)
    if old.owner.salt != new.owner.salt or not 0 < size <= len(new.ids):
        return False
    # Cheap where they differ: this runs on the GPU thread.
    return new.ids[size - 1] == old.ids[-1] and new.ids[:size] == old.ids
