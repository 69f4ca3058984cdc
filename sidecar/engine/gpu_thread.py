"""
The threads of MLX: one that computes, one that loads, one that describes.

Lazy arrays belong to the stream of the thread that made them, evaluated ones to nobody.
So whatever computes comes to the GPU thread, and a model that the load thread has read
is evaluated there, whole. Decode steps are described by another one while the GPU
thread waits for MLX, on the GPU thread's stream (step_ahead).
"""

import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from sidecar.engine.gpu_scheduler import Errand, GpuScheduler, Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Around each MLX call the GPU thread gives the interpreter's lock up, and waits as long
# as this to get it back from a thread at work, a few times a step. Python's own 5 ms
# made steps of 1.4 ms take 16 while another prompt was prepared.
_LOCK_WAIT_S = 0.0005
# Turns in a row: then the thread ends, /health says so, and the launcher starts again.
_MAX_FAILED = 20
_CHECK_EVERY_S = 0.2  # whether what waits for its turn is still wanted


@functools.cache
def gpu_thread() -> "GpuThread":
    """The process's only GPU thread, started at the first call."""
    sys.setswitchinterval(_LOCK_WAIT_S)
    return GpuThread()


@functools.cache
def load_thread() -> "MlxThread":
    """The process's only thread that reads weights, started at the first call."""
    return MlxThread("weights")


@functools.cache
def describing_thread() -> "MlxThread":
    """The process's only thread that describes steps for the GPU thread."""
    return MlxThread("describing")


class MlxThread:
    """
    Runs commands in order: by `call` (wait for the result) or `post` (do not wait).

    The thread never ends: a process in which a thread that used MLX has ended may abort
    at its exit (seen with 0.32). So it waits without a limit, too: waking up while
    Python shuts down would end it.
    """

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False only if the thread died of a defect."""
        return self._thread.is_alive()

    def call(self, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run `function` on the thread; return or raise what it does."""
        if threading.current_thread() is self._thread:
            return function()
        future = self.begin(function)
        try:
            return future.result(timeout_s)
        finally:  # else an error would keep its own frames, and what lies in them
            del future

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the thread; what it returns or raises, once it has."""
        future: Future[T] = Future()
        self._commands.put(functools.partial(_settle, future, function))
        return future

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread, later; it must not raise."""
        self._commands.put(function)

    def _run(self) -> None:
        while True:
            self._run_commands(wait=True)

    def _before_command(self) -> None:
        """For those who do other work than commands."""

    def _run_commands(self, *, wait: bool) -> None:
        """Run all commands that are there; `wait` for the first."""
        while True:
            try:
                command = self._commands.get(wait)
            except queue.Empty:
                return
            wait = False
            for run in (self._before_command, command):
                try:
                    run()
                except BaseException:
                    logger.exception("a posted command failed")
            del command, run  # what it holds may be a model


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """Run a function and hand over what comes of it."""
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - handed to the caller
        future.set_exception(error)
    finally:
        del future


class GpuThread(MlxThread):
    """Runs commands and, between them, gives the workers their turns."""

    def __init__(self) -> None:
        self._turns = GpuScheduler()
        self._busy_since: float | None = None
        super().__init__("gpu")

    @property
    def step_s(self) -> float:
        """How long the step in hand has been running, 0 if none is."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def call_in_steps(
        self,
        steps: Generator[None, None, T],
        *,
        is_background: bool = True,
        is_for_idle: bool = False,
        check: Callable[[], None] | None = None,
    ) -> T:
        """
        Run a generator on the thread, a turn from each yield to the next.

        Streams go on between them: this is for what would stall them in one piece.

        Args:
            is_background: whether it can wait for all others. is_for_idle: whether it
                goes on only while nobody else has work.
            check: asked while it waits for its turn; what it raises ends the generator.
        Returns:
            What the generator returns; what it raises is raised.
        """
        errand = _GeneratorErrand(steps)
        errand.is_background, errand.is_for_idle = is_background, is_for_idle
        self.add_worker(errand)
        try:
            while check and not wait([errand.future], _CHECK_EVERY_S).done:
                check()
            return errand.future.result()
        finally:
            self.remove_worker(errand)
            self.call(steps.close)
            del errand

    def wake_in(self, seconds: float) -> None:
        """Ask the workers again then, whatever they said now; any thread."""
        timer = threading.Timer(seconds, self.post, [lambda: None])
        timer.daemon = True
        timer.start()

    def add_worker(self, worker: Worker) -> None:
        """Give a worker its turns from now on."""
        self.call(lambda: self._turns.add(worker))

    def remove_worker(self, worker: Worker) -> None:
        """Take a worker's turns away."""
        self.call(lambda: self._turns.remove(worker))

    def _before_command(self) -> None:
        self._turns.hand_over()  # it may take long

    def _run(self) -> None:
        failed = 0
        while True:
            self._run_commands(wait=not self._turns.has_work())
            self._busy_since = time.monotonic()
            try:
                self._turns.take()
                failed = 0
            except BaseException:  # Rust code panics with what is no Exception
                logger.exception("a turn of the GPU thread failed")
                failed += 1
                if failed == _MAX_FAILED:
                    raise
            self._busy_since = None


class _GeneratorErrand(Errand, Generic[T]):
    """A generator as a worker."""

    def __init__(self, steps: Generator[None, None, T]) -> None:
        self._steps = steps
        self.future: Future[T] = Future()

    def has_work(self) -> bool:
        """Whether it goes on."""
        return not self.future.done()

    def interrupt(self, *, beside_streams: bool) -> bool:
        """To the next yield."""
        try:
            next(self._steps)
        except StopIteration as end:
            self.future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self.future.set_exception(error)
        return True
