"""How requests wait for a model: until they have its lease, or hear why not."""

from collections.abc import Generator
from typing import Generic, TypeVar

from sidecar.core.errors import (
    GOING_DOWN,
    InsufficientMemory,
    ModelLoadFailed,
    ModelNotFound,
    ModelTooLarge,
    SidecarError,
    TooSlow,
    Unavailable,
)
from sidecar.residents.model_state import ModelState, ServedModel, Waiter, anew
from sidecar.residents.pool_worker import PoolWorker
from sidecar.residents.weight_eviction import PoolLimits, WeightEviction

_RETRY_FAILED_S = 60.0
_WATCH_S = 1.0

E = TypeVar("E", bound=ServedModel)
# Each step as it begins, and why it failed; None where nothing changes.
LoadSteps = Generator[tuple[str, str | None] | None, None, None]


class LoadWaits(Generic[E]):
    """
    Waits for the worker's loads. Any thread.

    `wait` and `check_loadable` hold the worker's lock already, as do methods that begin
    with an underscore.
    """

    def __init__(
        self, worker: PoolWorker[E], room: WeightEviction[E], limits: PoolLimits
    ) -> None:
        self._worker = worker
        self._room = room
        self.limits = limits
        self.is_draining = False

    def wait(
        self, entry: ModelState[E], max_wait_s: float | None, time_left_s: float
    ) -> None:
        """
        Wait until a model is loaded, which counts a lease.

        Raises:
            SidecarError: see the pool's `lease`.
        """
        wait_s = min(self.limits.load_wait_s, time_left_s)
        deadline = self._worker.clock() + min(wait_s, max_wait_s or wait_s)
        self.check_loadable(entry)
        if entry.resident is None and max_wait_s is not None:
            self._check_soon(entry, max_wait_s)
        self._wait_leased(entry, deadline)

    def watch(self, entry: ModelState[E], longest_s: float) -> LoadSteps:
        """See the pool's `watch_load`."""
        last_step, deadline = "", self._worker.clock() + longest_s
        while self._worker.clock() < deadline:
            with self._worker.changed:
                refusal = self._refusal(entry)
                step = _step(entry) if refusal is None else "error"
                failure = refusal or entry.failure
                is_new = step and step != last_step
                if not is_new:
                    left = deadline - self._worker.clock()
                    self._worker.changed.wait(min(_WATCH_S, max(0.0, left)))
            if not step or not is_new:
                yield None
                continue
            last_step = step
            yield step, failure.message if step == "error" and failure else None
            if step in ("ready", "error"):
                return

    def check_loadable(self, entry: ModelState[E]) -> None:
        """
        Refuse what need not be waited for.

        Raises:
            SidecarError: why.
        """
        if entry.is_deleted:
            entry.is_leaving = True
            self._worker.wake()
            raise gone(entry.spec.id)
        if refusal := self._refusal(entry):
            raise refusal
        if entry.resident is not None:
            return  # whatever became of its files
        if entry.spec.fault:
            raise ModelLoadFailed(entry.spec.fault)
        since = self._worker.clock() - entry.failed_at
        if entry.state == "failed" and since < _RETRY_FAILED_S:
            raise self._failure(entry)

    def _refusal(self, entry: ModelState[E]) -> SidecarError | None:
        """Why nobody is to wait: the server ends, or only people could make room."""
        if self.is_draining:
            return Unavailable(GOING_DOWN, retry_after_s=5)
        if entry.resident is not None or entry.state == "loading" or entry.spec.fault:
            return None
        if fault := self._room.too_large(entry.spec):
            return ModelTooLarge(fault)
        if self._room.is_taken(entry, self._worker.entries.values()):
            return self._late(entry)
        return None

    def _wait_leased(self, entry: ModelState[E], deadline: float) -> None:
        """Wait for a load, which gives the lease."""
        waiter, seen = Waiter(), entry.num_failures
        entry.waiters.add(waiter)
        try:
            while not waiter.has_lease:
                self._worker.wish(entry)
                left = deadline - self._worker.clock()
                if left <= 0 or self._worker.is_closed:
                    raise self._late(entry)
                self._worker.changed.wait(left)
                if entry.num_failures != seen and not waiter.has_lease:
                    raise self._failure(entry)
                if not waiter.has_lease and (refusal := self._refusal(entry)):
                    raise refusal
        finally:
            entry.waiters.discard(waiter)

    def _check_soon(self, entry: ModelState[E], max_wait_s: float) -> None:
        expected_s = self._room.load_s(entry.spec.size_bytes)
        if expected_s is not None and expected_s > max_wait_s:
            self._worker.wish(entry)  # the next request finds it here
            raise TooSlow(
                f"the model has to be loaded first, which takes about {expected_s:g} s",
                param="mlx_max_ttft_s",
            )

    def _failure(self, entry: ModelState[E]) -> SidecarError:
        """Why the last load failed, for one more request."""
        return anew(entry.failure or ModelLoadFailed("the model could not be loaded"))

    def _late(self, entry: ModelState[E]) -> Unavailable:
        """Why it is not there: it loads, or nothing may leave for it."""
        others = [*self._worker.entries.values()]
        plan = self._room.plan(entry, others)
        is_coming = plan.fits or plan.victim is not None
        if entry.state == "loading" or is_coming or self._worker.is_closed:
            return Unavailable("the model is still loading", retry_after_s=10)
        entry.is_wanted = False  # nobody waits for it any more; who does wishes again
        self._worker.changed.notify_all()
        return InsufficientMemory(
            self._room.shortage(entry, others), param="model", retry_after_s=10
        )


def _step(entry: ModelState[E]) -> str | None:
    """Where its load is."""
    if entry.state == "loaded":
        return "ready"
    return "error" if entry.state == "failed" else entry.step


def gone(own_id: str) -> ModelNotFound:
    """The error for a model whose files were deleted."""
    return ModelNotFound(f"model {own_id} is not served any more", param="model")
