"""Which conversations are to be written to the disk, and since when they rest."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sidecar.core.conversation import Conversation, Whose
from sidecar.core.prompt import ModelIds

_MOST = 64  # conversations; the one that rests longest is written or not at all
_MOST_OTHERS = 16


@dataclass(frozen=True, slots=True)
class Due:
    """
    A path that a sequence left, and when.

    Args:
        others: ends on it of other conversations, the deepest first: due again where
            this one is forgotten.
    """

    ids: ModelIds
    owner: Conversation
    since: float
    others: tuple["Due", ...] = ()


class DueList:
    """
    Ends of conversations that rest. Any thread.

    Args:
        clock: seconds. For tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due: list[Due] = []

    def __len__(self) -> int:
        return len(self._due)

    def note(self, ids: ModelIds, owner: Conversation) -> None:
        """A sequence left this path; what it went on from is not an end any more."""
        new = Due(ids, owner, self._clock())
        with self._lock:
            before, kept = list[Due](), list[Due]()
            for old in self._due:
                (before if _goes_on(old, new) else kept).append(old)
            others = [
                replace(due, others=())
                for old in before
                for due in (old, *old.others)
                if due.owner.speaker != owner.speaker
            ]
            others.sort(key=lambda due: -len(due.ids))
            new = replace(new, others=tuple(others[:_MOST_OTHERS]))
            self._due = [*kept, new][-_MOST:]

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
            kept = [other for other in self._due if other is not due]
            is_there = len(kept) < len(self._due)
            self._due = kept
        return is_there

    def forget(self, whose: Whose | None = None) -> None:
        """Forget all, or some conversations; what others said in these stays due."""
        with self._lock:
            due, self._due = self._due, []
            if whose is None:
                return
            for each in due:
                ends = (each, *each.others)
                left = [end for end in ends if not whose.covers(end.owner)]
                if len(left) == len(ends):
                    self._due.append(each)
                elif left:
                    self._due.append(replace(left[0], others=tuple(left[1:])))


def _goes_on(old: Due, new: Due) -> bool:
    size = len(old.ids)
    if old.owner.salt != new.owner.salt or not 0 < size <= len(new.ids):
        return False
    # Cheap where they differ: this runs on the GPU thread.
    return new.ids[size - 1] == old.ids[-1] and new.ids[:size] == old.ids
