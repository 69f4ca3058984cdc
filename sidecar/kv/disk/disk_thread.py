"""
The one thread that reads and writes KV: restores first, then writes, then digests.

It never ends, as no thread does that used MLX (engine/gpu_thread), and waits without a
limit for the same reason.
"""

import enum
import functools
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_Entry = tuple[int, int, Callable[[], None]]


class Urgency(enum.IntEnum):
    """Who goes first."""

    RESTORE = 0
    WRITE = 1
    TIDY = 2


@functools.cache
def disk_thread() -> "DiskThread":
    """The process's only one, started at the first call."""
    return DiskThread()


class DiskThread:
    """Runs what it is given, the most urgent first. Any thread may give."""

    def __init__(self) -> None:
        self._waiting: queue.PriorityQueue[_Entry] = queue.PriorityQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name="kv-disk", daemon=True).start()

    def submit(self, urgency: Urgency, work: Callable[[], T]) -> "Future[T]":
        """Have it done; its result, or what it raised."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._waiting.put((urgency, next(self._numbers), run))
        return future

    def _run(self) -> None:
        while True:
            _, _, run = self._waiting.get()
            run()
            del run  # what it holds may be a model
