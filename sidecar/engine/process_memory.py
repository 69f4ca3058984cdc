"""
The memory of the whole process: what is in use, what is reserved, how room is made.

All models share it: their weights, their stored KV, what their running requests hold
and what prefilling takes for a while. So whatever is about to be allocated is reserved
first, under one lock: two requests that each fit alone are not both let in.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from sidecar.core.errors import GOING_DOWN, Busy, SidecarError, Unavailable
from sidecar.engine.gpu_scheduler import Errand
from sidecar.engine.gpu_thread import GpuThread
from sidecar.kv.kv_layers import Released, release_freed_memory

if TYPE_CHECKING:
    from sidecar.config.settings import EngineConfig

logger = logging.getLogger(__name__)

_SAMPLE_EVERY_S = 1.0
_RETRY_EVERY_S = 1.0
_MAX_COUNTING_S = 1.0  # how long a refusal waits for the memory to be counted anew
# Buffers: a walk over all that is stored, 7 ms where that is much. Hardly anybody waits
# for it in an idle moment; while streams decode it is seldom made.
_COUNT_IDLE_EVERY_S, _COUNT_BUSY_EVERY_S = 1.0, 10.0
_COUNT_ALWAYS_AT = 0.75  # of the limit
_CLEAR_AT, _FULL_AT, _EVICT_TO = 0.90, 1.0, 0.80


@dataclass(frozen=True, slots=True)
class Demand:
    """
    Memory that jobs still need.

    Args:
        held: bytes kept until they end. peak: most beyond that, while one prefills.
        buffers: of the device's, that what is held lies in.
    """

    held: int
    peak: int
    buffers: int = 0

    @property
    def total(self) -> int:
        """What must be free."""
        return self.held + self.peak

    def __add__(self, other: "Demand") -> "Demand":
        """Of jobs that are prefilled one at a time."""
        held, buffers = self.held + other.held, self.buffers + other.buffers
        return Demand(held, max(self.peak, other.peak), buffers)


NOTHING = Demand(0, 0)


def _ignore(_seconds: float) -> None:
    """Nobody is asked again."""


class AdmittedJob(Protocol):
    """What is admitted; `due` is what of its memory is not in use yet."""

    due: Demand


class Evictable(Protocol):
    """Keeps KV that can be let go."""

    released: Released

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""

    def arrays(self) -> list[mx.array]:
        """What it lies in."""

    def evict_bytes(self, num_bytes: int) -> None:
        """Free at least that much, if it is there; GPU thread only."""

    def evict_buffers(self, num_buffers: int) -> None:
        """The same, by the number of arrays."""


@dataclass(frozen=True)
class Running:
    """
    What one model and its requests hold.

    Args:
        num_weights: arrays of its weights. arrays: gives those of its running requests.
    """

    num_weights: int
    arrays: Callable[[], list[mx.array]]


class ProcessMemory:
    """
    Watches the process against its limit.

    `sample` and `relieve` on the GPU thread; the numbers may be read from any. They are
    of one moment: KV that was given back since would count as free and as not in use.

    Args:
        limit_bytes: MAX_PROCESS_MEMORY.
        stored: the KV that could be evicted, of all models.
        limit_buffers: how many of the device's there may be; None: any number.
    """

    def __init__(
        self, limit_bytes: int, stored: Evictable, limit_buffers: int | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.wake_in: Callable[[float], None] = _ignore  # has `is_untidy` asked again
        self.limit_buffers = limit_buffers
        self._stored = stored
        self._running: list[Running] = []
        self._idle: list[Callable[[], int]] = []
        self._sampled_at = self._counted_at = 0.0
        # When something began or ended since; None: nothing has.
        self._changed_at: float | None = 0.0
        self.active_bytes = self.peak_bytes = self._fixed_bytes = 0
        self.live_buffers, self.free_buffers = 0, math.inf
        self.sample()

    def watch(self, running: Running) -> Callable[[], None]:
        """Count what a model holds; what is returned ends it, repeatably."""
        self._running.append(running)

        def end() -> None:
            if running in self._running:
                self._running.remove(running)

        return end

    def watch_idle(self, let_go: Callable[[], int]) -> Callable[[], None]:
        """
        Let go what nobody uses where memory is short; what is returned ends it.

        Args:
            let_go: called on the GPU thread, must not wait for any other one.
        """
        self._idle.append(let_go)

        def end() -> None:
            if let_go in self._idle:
                self._idle.remove(let_go)

        return end

    @property
    def free_bytes(self) -> int:
        """What is left below the limit, stored KV not counted."""
        return max(0, self.limit_bytes - self._fixed_bytes)

    @property
    def stored_bytes(self) -> int:
        """KV kept for reuse, of all models; any thread."""
        return self._stored.num_bytes

    def sample(self) -> None:
        """Note what is in use now that something has begun or ended."""
        is_first = self._changed_at is None
        if is_first:
            self._changed_at = time.monotonic()
        self._note_use()
        if is_first and self._changed_at is not None and not self.is_untidy:
            self.wake_in(_COUNT_IDLE_EVERY_S)

    def _note_use(self) -> None:
        self._sampled_at = time.monotonic()
        self.active_bytes = mx.get_active_memory()
        self.peak_bytes = mx.get_peak_memory()
        # What is stored would make room, and what is held for a while makes it.
        freeable = self._stored.num_bytes
        if self._stored.released:
            freeable += sum(array.nbytes for array in self._left().values())
        self._fixed_bytes = self.active_bytes - freeable
        near = self.limit_buffers is not None and (
            self.live_buffers > _COUNT_ALWAYS_AT * self.limit_buffers
        )
        if near:
            self.count_buffers()

    def count_buffers(self) -> None:
        """Count the device's buffers: a walk over all that is kept. GPU thread only."""
        self._counted_at, self._changed_at = time.monotonic(), None
        stored, used = self._stored_arrays(), self._used_arrays()
        fixed = len(used.keys() - stored) + sum(r.num_weights for r in self._running)
        self.live_buffers = fixed + len(stored) + len(self._left())
        if self.limit_buffers is not None:
            self.free_buffers = max(0, int(_CLEAR_AT * self.limit_buffers) - fixed)

    @property
    def is_untidy(self) -> bool:
        """Whether `tidy` has something to do now."""
        if self._stored.released.waits_for_idle:
            return True
        age_s = time.monotonic() - self._counted_at
        return self._changed_at is not None and age_s >= _COUNT_IDLE_EVERY_S

    def count_in_time(self) -> None:
        """Count buffers if something has changed long ago. GPU thread only."""
        changed_at = self._changed_at
        if changed_at is None or time.monotonic() - changed_at < _COUNT_BUSY_EVERY_S:
            return
        try:
            self.count_buffers()
        except Exception:  # no stream ends for it
            logger.exception("the device's buffers could not be counted")

    def tidy(self) -> None:
        """Give back what waits for an idle moment, and count. GPU thread only."""
        self._changed_at = None  # else a failure would be tried for ever
        if self._stored.released.waits_for_idle:
            self._stored.released.give_back()
        self.count_buffers()

    def _stored_arrays(self) -> dict[int, mx.array]:
        return {id(array): array for array in self._stored.arrays()}

    def _used_arrays(self) -> dict[int, mx.array]:
        return {id(array): array for run in self._running for array in run.arrays()}

    def _left(self) -> dict[int, mx.array]:
        """What is held for a while, and is neither stored nor in use."""
        held = {id(array): array for array in self._stored.released.arrays}
        if not held:
            return {}
        others = self._stored_arrays().keys() | self._used_arrays().keys()
        return {name: array for name, array in held.items() if name not in others}

    def let_go_idle(self) -> None:
        """Let go what nobody uses, and note what is in use then. GPU thread only."""
        for let_go in tuple(self._idle):
            let_go()
        self.sample()

    def count_anew(self, gpu: GpuThread) -> None:
        """
        Have the same done before something is refused; any thread.

        Where the GPU thread does not come to it within a second, the numbers stay:
        what runs so long stands in them.
        """

        def count() -> None:
            self.let_go_idle()
            self.count_buffers()

        with contextlib.suppress(TimeoutError):
            gpu.call(count, _MAX_COUNTING_S)

    def relieve(self, needed_bytes: int = 0) -> bool:
        """
        Make room in order: the allocator's cache, what nobody uses, stored KV.

        Args:
            needed_bytes: about to be allocated.
        Returns:
            Whether it all fits now.
        """
        now = time.monotonic()
        if not needed_bytes and now - self._sampled_at < _SAMPLE_EVERY_S:
            return True
        self._note_use()
        self._relieve_buffers()
        used = self.active_bytes + mx.get_cache_memory() + needed_bytes
        if used > _CLEAR_AT * self.limit_bytes:
            self._stored.released.let_go()
            release_freed_memory()
            self.sample()
            used = self.active_bytes + needed_bytes
        if used > _CLEAR_AT * self.limit_bytes:
            self.let_go_idle()
            release_freed_memory()
            used = self.active_bytes + needed_bytes
        if used > _CLEAR_AT * self.limit_bytes:
            self._stored.evict_bytes(used - int(_EVICT_TO * self.limit_bytes))
            release_freed_memory()
            self.sample()
            logger.info(
                "made room limit=%d active=%d", self.limit_bytes, self.active_bytes
            )
        return self.active_bytes + needed_bytes <= _FULL_AT * self.limit_bytes

    def _relieve_buffers(self) -> None:
        """Have less stored where the device will soon take no more buffers."""
        maximum = self.limit_buffers
        if maximum is None or self.live_buffers <= _CLEAR_AT * maximum:
            return
        self._stored.evict_buffers(self.live_buffers - int(_EVICT_TO * maximum))
        release_freed_memory()  # what the allocator keeps counts, too
        self.sample()
        logger.info("made room limit=%d buffers=%d", maximum, self.live_buffers)


class Releasing(Errand):
    """Lets go what ended, some steps later, or at once where nothing else is done."""

    def __init__(
        self, released: Released, wake_in: Callable[[float], None] = _ignore
    ) -> None:
        self._released = released
        self._wake_in = wake_in
        self._failed_at = -math.inf

    def has_work(self) -> bool:
        """Whether something is held, and has not just failed to be let go."""
        has_failed = time.monotonic() - self._failed_at < _RETRY_EVERY_S
        return bool(self._released) and not has_failed

    def interrupt(self, *, beside_streams: bool) -> bool:
        """Count a step of the streams; it stands in nobody's way."""
        try:
            if beside_streams:
                self._released.step()
            else:
                self._released.let_go()
        except Exception:
            logger.exception("what has ended could not be let go")
            self._failed_at = time.monotonic()
            self._wake_in(_RETRY_EVERY_S)
        return False


class Tidying(Errand):
    """Gives freed memory back and counts buffers when nobody else has work."""

    is_for_idle = True

    def __init__(self, process: ProcessMemory) -> None:
        self._process = process

    def has_work(self) -> bool:
        """Whether something has begun or ended since it was done."""
        return self._process.is_untidy

    def interrupt(self, *, beside_streams: bool) -> bool:
        """Give back, and count."""
        try:
            self._process.tidy()
        except Exception:
            logger.exception("the memory could not be tidied")
        return True


class Admission:
    """
    The places and the memory that requests of all models share. Any thread.

    Args:
        config: how many may run and wait.
    """

    def __init__(self, config: "EngineConfig") -> None:
        self._max_rows = config.max_concurrent
        self.max_jobs = config.max_concurrent + config.max_queued
        self._lock = threading.Lock()
        self._open: set[AdmittedJob] = set()
        self._loading = NOTHING
        self._is_draining = False
        self._paused_by: Callable[[], SidecarError] | None = None
        self._decoding: list[Callable[[], int]] = []

    @property
    def num_open(self) -> int:
        """Jobs admitted and not released."""
        with self._lock:
            return len(self._open)

    @property
    def reserved(self) -> Demand:
        """What the jobs and loads admitted before will still allocate."""
        with self._lock:
            return self._reserved()

    def admit(self, job: AdmittedJob, demand: Callable[[Demand], Demand]) -> None:
        """
        Take a job in; it must be released.

        Args:
            demand: what it will need, given what was reserved for others; raises
                InsufficientMemory.
        Raises:
            Busy: the queue is full. Unavailable: the server is going down, or takes
                none for now.
        """
        with self._lock:
            if self._is_draining:
                raise Unavailable(GOING_DOWN, retry_after_s=5)
            if self._paused_by is not None:
                raise self._paused_by()
            if len(self._open) >= self.max_jobs:
                raise Busy(f"all {self.max_jobs} places are taken", retry_after_s=2)
            job.due = demand(self._reserved())
            self._open.add(job)

    def release(self, job: AdmittedJob) -> None:
        """Give a job's place back; repeatable."""
        with self._lock:
            self._open.discard(job)

    @contextlib.contextmanager
    def loading(self, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Reserve a load's memory, until what is yielded says that it is in use."""
        reserved = Demand(num_bytes, 0)

        def arrived() -> None:
            nonlocal reserved
            with self._lock:
                self._loading += Demand(-reserved.held, 0)
                reserved = NOTHING

        with self._lock:
            self._loading += reserved
        try:
            yield arrived
        finally:
            arrived()

    @property
    def is_paused(self) -> bool:
        """Whether new jobs are refused until something has ended."""
        return self._paused_by is not None

    @contextlib.contextmanager
    def paused(self, why: Callable[[], SidecarError]) -> Iterator[None]:
        """Take no new jobs within, but refuse them; those that run go on."""
        with self._lock:
            self._paused_by = why
        try:
            yield
        finally:
            with self._lock:
                self._paused_by = None

    def drain(self) -> None:
        """Take no new jobs."""
        with self._lock:
            self._is_draining = True

    def count_rows(self, num_rows: Callable[[], int]) -> Callable[[], None]:
        """Count what another model decodes; what is returned ends it, repeatably."""
        self._decoding.append(num_rows)

        def end() -> None:
            if num_rows in self._decoding:
                self._decoding.remove(num_rows)

        return end

    def free_rows(self) -> int:
        """Rows that may still be decoded beside those of all models."""
        return self._max_rows - sum(count() for count in self._decoding)

    def _reserved(self) -> Demand:
        return sum((job.due for job in self._open), self._loading)
