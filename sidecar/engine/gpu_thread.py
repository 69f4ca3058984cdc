"""The one thread of every MLX call in the process."""

import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sidecar.engine.turns import Turns, Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Around each MLX call the GPU thread gives the interpreter's lock up, and waits as long
# as this to get it back from a thread at work, a few times a step. Python's own 5 ms
# made steps of 1.4 ms take 16 while another prompt was prepared.
_LOCK_WAIT_S = 0.0005


@functools.cache
def gpu_thread() -> "GpuThread":
    """The process's only GPU thread, started at the first call."""
    sys.setswitchinterval(_LOCK_WAIT_S)
    return GpuThread()


class GpuThread:
    """
    Runs commands in order and, between them, the workers in turn.

    Lazy arrays do not cross threads, so whatever touches MLX comes here: by `call`
    (wait for the result) or `post` (do not wait). The thread never ends: a process in
    which a thread that used MLX has ended may abort at its exit (seen with 0.32). So
    it waits without a limit, too: waking up while Python shuts down would end it.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._turns = Turns()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False only if the thread died of a defect."""
        return self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """How long the step in hand has been running, 0 if none is."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def call(self, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run `function` on the GPU thread; return or raise what it does."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._commands.put(run)
        return future.result(timeout_s)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the GPU thread, later; it must not raise."""
        self._commands.put(function)

    def add_worker(self, worker: Worker) -> None:
        """Give a worker its turns from now on."""
        self.call(lambda: self._turns.add(worker))

    def remove_worker(self, worker: Worker) -> None:
        """Take a worker's turns away."""
        self.call(lambda: self._turns.remove(worker))

    def _run(self) -> None:
        while True:
            self._run_commands(wait=not self._turns.has_work())
            self._busy_since = time.monotonic()
            self._turns.take()
            self._busy_since = None

    def _run_commands(self, *, wait: bool) -> None:
        """Run all commands that are there; `wait` for the first."""
        while True:
            try:
                command = self._commands.get(wait)
            except queue.Empty:
                return
            wait = False
            try:
                command()
            except Exception:
                logger.exception("a posted command failed")
