"""
Decides when a conversation's KV is written to the disk: once it rests, or has grown
too long. How it is written stands in slot_writer.py.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace

from sidecar.core.conversation import Conversation, ForgetFilter
from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.disk_thread import Urgency
from sidecar.kv.disk.ports import DiskSettings, Machine, salt_name
from sidecar.kv.disk.slot_index import SlotIndex
from sidecar.kv.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_TELLING_S = 1.0  # a busy process' turn may still be telling its end
_FLUSH_S = 30.0

Write = Callable[..., None]  # (due, *, is_last): writes it, on the disk thread
ShareMarks = Callable[[], None]  # reads and writes tombstones, if there are new ones


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """
    A path that a sequence left, and when.

    Args:
        others: ends on it of other conversations, the deepest first: due again where
            this one is forgotten.
    """

    ids: ModelIds
    conversation: Conversation
    since: float
    others: tuple["PendingWrite", ...] = ()


class PendingWrites:
    """
    Ends of conversations that rest. Any thread.

    Args:
        clock: seconds. For tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due: list[PendingWrite] = []

    def __len__(self) -> int:
        return len(self._due)

    def note(self, ids: ModelIds, conversation: Conversation) -> None:
        """A sequence left this path; what it went on from is not an end any more."""
        new = PendingWrite(ids, conversation, self._clock())
        with self._lock:
            before, kept = list[PendingWrite](), list[PendingWrite]()
            for old in self._due:
                (before if _goes_on(old, new) else kept).append(old)
            others = [
                replace(due, others=())
                for old in before
                for due in (old, *old.others)
                if due.conversation.session_key != conversation.session_key
            ]
            others.sort(key=lambda due: -len(due.ids))
            new = replace(new, others=tuple(others[:_MAX_OTHERS]))
            self._due = [*kept, new][-_MAX:]

    def take(self, quiet_s: float) -> list[PendingWrite]:
        """Those that have rested so long, taken off the list."""
        before = self._clock() - quiet_s
        with self._lock:
            taken = [due for due in self._due if due.since <= before]
            self._due = [due for due in self._due if due.since > before]
        return taken

    def waiting(self) -> list[PendingWrite]:
        """All that is on the list."""
        with self._lock:
            return list(self._due)

    def drop(self, due: PendingWrite) -> bool:
        """Take one off the list; False: it is not there any more."""
        with self._lock:
            kept = [other for other in self._due if other is not due]
            is_there = len(kept) < len(self._due)
            self._due = kept
        return is_there

    def forget(self, forget_filter: ForgetFilter | None = None) -> None:
        """Forget all, or some conversations; what others said in these stays due."""
        with self._lock:
            due, self._due = self._due, []
            if forget_filter is None:
                return
            for each in due:
                ends = (each, *each.others)
                left = [
                    end for end in ends if not forget_filter.covers(end.conversation)
                ]
                if len(left) == len(ends):
                    self._due.append(each)
                elif left:
                    self._due.append(replace(left[0], others=tuple(left[1:])))


class WriteQueue:
    """
    Of one loaded model, until it is closed. Any thread.

    Args:
        write: takes what is due and, by name, whether the process ends.
        share_marks: has what hides turns that were written read and written.
    """

    def __init__(
        self,
        store: PrefixStore,
        index: SlotIndex,
        machine: Machine,
        settings: DiskSettings,
        write: Write,
        share_marks: ShareMarks,
    ) -> None:
        self._store = store
        self._index = index
        self._machine = machine
        self._settings = settings
        self._write = write
        self._share_marks = share_marks
        self._closed = threading.Event()
        self.due = PendingWrites()

    def start(self) -> None:
        """Look again and again, on a thread of its own."""
        threading.Thread(target=self._watch, name="kv-due", daemon=True).start()

    def close(self) -> None:
        """Look no more; repeatable."""
        self._closed.set()

    def _watch(self) -> None:
        tick_s = min(1.0, max(_TICK_S, self._settings.quiet_s / 4))
        while not self._closed.wait(tick_s):
            try:
                self.poll()
            except Exception:
                logger.exception("KV could not be handed over to the disk")

    def poll(self) -> None:
        """Hand over what has rested long enough, or has grown too long."""
        self._share_marks()
        rest_s = self._settings.quiet_s
        if not self._machine.is_idle():
            rest_s = max(rest_s, _TELLING_S)
        for due in self.due.take(rest_s):
            self._submit(due, is_last=False)
        for due in self.due.waiting():
            if self._is_long(due):
                self._submit_long(due)

    def flush(self) -> None:
        """Have all that is due written, now; returns when it is."""
        self._share_marks()
        for due in self.due.take(0.0):
            self._submit(due, is_last=True)
        # Behind all writes that are on their way, those of before too.
        ended = self._machine.thread.submit(Urgency.WRITE, _nothing)
        with contextlib.suppress(TimeoutError):
            ended.result(_FLUSH_S)

    def _is_long(self, due: PendingWrite) -> bool:
        """Whether it is written although it goes on."""
        maximum = self._settings.run_tokens
        if len(due.ids) < max(maximum, self._settings.min_tokens):
            return False
        found = self._store.survey(due.ids, due.conversation.salt)
        size = (
            found.depth
            - self._index.match(due.ids, salt_name(due.conversation.salt)).depth
        )
        states = found.ends[-1][2] if found.ends else 0
        return size >= maximum and size * found.token_bytes >= states

    def _submit_long(self, due: PendingWrite) -> None:
        """Have it written, if it is long and an end even when the disk has time."""

        def write() -> None:
            if self._is_long(due) and self.due.drop(due):
                self._write_of(due, is_last=False)

        self._machine.thread.submit(Urgency.WRITE, write)

    def _submit(self, due: PendingWrite, *, is_last: bool) -> "Future[None]":
        write = functools.partial(self._write_of, due, is_last=is_last)
        return self._machine.thread.submit(Urgency.WRITE, write)

    def _write_of(self, due: PendingWrite, *, is_last: bool) -> None:
        """Have it written; if it was forgotten meanwhile, what others said of it."""
        self._write(due, is_last=is_last)
        if not self._store.is_current(due.conversation):
            for other in due.others:
                self._write(other, is_last=is_last)


def _nothing() -> None:
    pass


_MAX = 64  # conversations; the one that rests longest is written or not at all
_MAX_OTHERS = 16


def _goes_on(old: PendingWrite, new: PendingWrite) -> bool:
    size = len(old.ids)
    if old.conversation.salt != new.conversation.salt or not 0 < size <= len(new.ids):
        return False
    # Cheap where they differ: this runs on the GPU thread.
    return new.ids[size - 1] == old.ids[-1] and new.ids[:size] == old.ids
