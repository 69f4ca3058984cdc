"""
Gives conversations to the writer: those that rest, and those that grow too long.

Which they are stands in due.py; how one is written, in slot_writer.py.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError

from sidecar.kv.disk.disk_thread import Urgency
from sidecar.kv.disk.due import Due, DueList
from sidecar.kv.disk.ports import DiskSettings, Machine, salt_name
from sidecar.kv.disk.slot_index import SlotIndex
from sidecar.kv.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_TELLING_S = 1.0  # a busy process' turn may still be telling its end
_FLUSH_S = 30.0

Write = Callable[..., None]  # (due, *, is_last): writes it, on the disk thread
Rewrite = Callable[[], None]  # has what changed since put right, if anything did


class HandOver:
    """
    Of one loaded model, until it is closed. Any thread.

    Args:
        write: takes what is due and, by name, whether the process ends.
        rewrite: hands over what of the slots is to be another.
    """

    def __init__(
        self,
        store: PrefixStore,
        index: SlotIndex,
        machine: Machine,
        settings: DiskSettings,
        write: Write,
        rewrite: Rewrite,
    ) -> None:
        self._store = store
        self._index = index
        self._machine = machine
        self._settings = settings
        self._write = write
        self._rewrite = rewrite
        self._closed = threading.Event()
        self.due = DueList()

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
                self.look()
            except Exception:
                logger.exception("KV could not be handed over to the disk")

    def look(self) -> None:
        """Hand over what has rested long enough, or has grown too long."""
        self._rewrite()
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
        self._rewrite()
        for due in self.due.take(0.0):
            self._submit(due, is_last=True)
        # Behind all writes that are on their way, those of before too.
        ended = self._machine.thread.submit(Urgency.WRITE, _nothing)
        with contextlib.suppress(TimeoutError):
            ended.result(_FLUSH_S)

    def _is_long(self, due: Due) -> bool:
        """Whether it is written although it goes on."""
        most = self._settings.run_tokens
        if len(due.ids) < max(most, self._settings.min_tokens):
            return False
        found = self._store.survey(due.ids, due.owner.salt)
        size = found.depth - self._index.match(due.ids, salt_name(due.owner.salt)).depth
        states = found.ends[-1][2] if found.ends else 0
        return size >= most and size * found.token_bytes >= states

    def _submit_long(self, due: Due) -> None:
        """Have it written, if it is long and an end even when the disk has time."""

        def write() -> None:
            if self._is_long(due) and self.due.drop(due):
                self._write_of(due, is_last=False)

        self._machine.thread.submit(Urgency.WRITE, write)

    def _submit(self, due: Due, *, is_last: bool) -> "Future[None]":
        write = functools.partial(self._write_of, due, is_last=is_last)
        return self._machine.thread.submit(Urgency.WRITE, write)

    def _write_of(self, due: Due, *, is_last: bool) -> None:
        """Have it written; if it was forgotten meanwhile, what others said of it."""
        self._write(due, is_last=is_last)
        if not self._store.is_current(due.owner):
            for other in due.others:
                self._write(other, is_last=is_last)


def _nothing() -> None:
    pass
