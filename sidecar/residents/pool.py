"""
The models of one process: loaded when asked for, leased, and let go when room is short.

A request leases its model from when it is routed until its last byte is written; what
is leased never leaves. One thread of the pool loads and unloads, one model at a time,
so nothing races for the same bytes: requests say what they want and wait. Room is made
before a load: the model that was used longest ago goes first, pinned ones never, and a
model counts as gone when its bytes are measured to be back.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sidecar.config.sources import ConfigError
from sidecar.core.errors import (
    ModelBusy,
    ModelNotFound,
    ModelPinned,
    ModelTooLarge,
)
from sidecar.residents.catalog import Catalog
from sidecar.residents.load_waits import LoadSteps, LoadWaits, gone
from sidecar.residents.model_state import (
    ModelSpec,
    ModelState,
    ModelView,
    ServedModel,
    Tell,
)
from sidecar.residents.pool_worker import LOAD_END_S, PoolWorker
from sidecar.residents.weight_eviction import PoolLimits, WeightEviction, Weights

logger = logging.getLogger(__name__)

_UNLOAD_WAIT_S = 30.0  # for leases of a model that has to leave
_RESCAN_S = 10.0  # between two looks that nobody asked for


E = TypeVar("E", bound=ServedModel)


class ResidentPool(Generic[E]):
    """
    Loads models, leases them out, lets them go. Safe from any thread.

    Args:
        find: looks for what can be served, and how requests name it.
        load: makes a resident of an offer, telling its steps; may take minutes.
        weights: the memory that weights are in.
        clock: seconds. For tests.
    """

    def __init__(
        self,
        find: Callable[[], Catalog],
        load: Callable[[ModelSpec, Tell], E],
        weights: Weights,
        limits: PoolLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        catalog = find()
        self._find, self._found_at = find, clock()
        self._names = catalog.names
        self.limits = limits
        self._room = WeightEviction[E](weights, limits)
        self._worker = PoolWorker[E](catalog.specs, load, self._room, limits, clock)
        self._waits = LoadWaits[E](self._worker, self._room, limits)
        self.is_stopped = False  # what runs all the same is to end
        self._num_hits = self._num_misses = 0

    def use(self, limits: PoolLimits) -> None:
        """Go by other limits from now on."""
        for owner in (self, self._room, self._worker, self._waits):
            owner.limits = limits

    # What there is.

    def entries(self) -> tuple[ModelView, ...]:
        """All models, the default one first."""
        with self._worker.changed:
            now, seconds = self._worker.clock(), self._room.load_s
            default, all_entries = self._names.default, self._worker.entries.values()
            update_spec = [entry for entry in all_entries if entry.is_available]
            rows = sorted(update_spec, key=lambda entry: entry.spec.id != default)
            return tuple(row.seen(now, seconds(row.spec.size_bytes)) for row in rows)

    def entry(self, name: str) -> ModelView:
        """
        The model that a name means; "": the default one.

        Raises:
            ModelNotFound: no served model has that name.
        """
        own_id = self._resolve(name)
        for entry in self.entries():
            if entry.id == own_id:
                return entry
        raise gone(own_id)

    def _resolve(self, name: str) -> str:
        """The id that a name means; what came since the last look is found as well."""
        try:
            return self._names.resolve(name)
        except ModelNotFound:
            if not self.rescan(at_once=False):
                raise
        return self._names.resolve(name)

    @property
    def num_leases(self) -> int:
        """Requests that hold a model."""
        with self._worker.changed:
            return sum(entry.num_leases for entry in self._worker.entries.values())

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new work."""
        return self._waits.is_draining

    def loaded(self) -> tuple[E, ...]:
        """Loaded models, without a lease: for a look at numbers."""
        with self._worker.changed:
            found = (entry.resident for entry in self._worker.entries.values())
            return tuple(resident for resident in found if resident is not None)

    # Requests.

    def default_fault(self) -> str | None:
        """Why the default model is too large for the memory there is; None: it fits."""
        return self._room.too_large(self._entry("").spec)

    def start_loading(self) -> None:
        """Begin to load what is wanted from the start, the default one first."""
        for name in self.limits.pinned:
            if self._names.find(name) is None:
                logger.warning("PINNED_MODELS: no model is named %s", name)
        pinned = [
            entry.spec.id for entry in self._worker.entries.values() if entry.pinned
        ]
        for name in ("", *pinned, *self.limits.preload):
            try:
                self._want(self._entry(name))
            except ModelNotFound as error:
                logger.warning("PRELOAD_MODELS: %s", error)

    def _want(self, entry: ModelState[E]) -> None:
        too_large = self._room.too_large(entry.spec)
        fault = entry.spec.fault or too_large
        with self._worker.changed:
            if fault and entry.spec.id != self._names.default:
                logger.warning("not loaded at the start: %s", fault)
            elif too_large:  # who starts the server hears of its default model
                entry.failed(ModelTooLarge(too_large), self._worker.clock())
            elif entry.resident is None and not fault:
                self._worker.wish(entry)

    def is_loaded(self, name: str, patience_s: float) -> bool:
        """
        Have a model loaded if it is not; whether it is there, or failed, within a time.

        Raises:
            ModelNotFound, ModelLoadFailed, ModelTooLarge: as `lease`.
        """
        entry = self._entry(name)
        with self._worker.changed:
            if entry.is_ready and not entry.is_deleted:
                return True
            self._waits.check_loadable(entry)
            self._worker.wish(entry)
            self._num_misses += 1
        steps = self.watch_load(name, patience_s)
        return any(step and step[0] in ("ready", "error") for step in steps)

    @contextlib.contextmanager
    def lease(
        self,
        name: str,
        max_wait_s: float | None = None,
        *,
        time_left_s: float = math.inf,
    ) -> Iterator[E]:
        """
        Hold a model for the length of a request; it is loaded if it has to be.

        Args:
            max_wait_s: what the request bears, if less than LOAD_WAIT_SECONDS: it is
                refused at once if the load is expected to take longer.
            time_left_s: until the request's own time limit.
        Raises:
            ModelNotFound: no served model has that name.
            TooSlow: its load will take longer than that; it goes on all the same.
            Unavailable: it is still loading after LOAD_WAIT_SECONDS.
            InsufficientMemory, ModelTooLarge: there is no room for it; at once, if
                pinned models alone leave none.
            ModelLoadFailed: its load failed.
        """
        entry = self._entry(name)
        with self._worker.changed:
            if entry.is_ready and not (self.is_draining or entry.is_deleted):
                entry.num_leases += 1
                self._num_hits += 1
            else:
                self._num_misses += 1
                self._waits.wait(entry, max_wait_s, time_left_s)
            entry.last_access = self._worker.clock()
            resident = entry.resident
        assert resident is not None
        try:
            yield resident
        finally:
            with self._worker.changed:
                entry.num_leases -= 1
                entry.last_access = self._worker.clock()
                self._worker.changed.notify_all()

    @property
    def lease_counts(self) -> dict[str, int]:
        """Leases of models that were loaded (`hits`), waits for others (`misses`)."""
        return {"hits": self._num_hits, "misses": self._num_misses}

    # What people do by hand.

    def load(self, name: str, *, pin: bool = False) -> ModelView:
        """
        Load a model now and wait for it.

        Raises:
            As `lease`.
        """
        entry = self._entry(name)
        with self._worker.changed:
            if entry.state == "failed":
                entry.state = "unloaded"  # asked for by hand: at once
            entry.pinned = entry.pinned or pin
        with self.lease(name):
            return self.entry(name)

    def unload(self, name: str, *, force: bool = False) -> int:
        """
        Let a model go now; the bytes that came back.

        Args:
            force: wait for its leases, at most 30 s, while nobody new gets one; and
                take a pinned one.
        Raises:
            ModelPinned, ModelBusy: not without `force`; or still busy.
        """
        entry = self._entry(name)
        wait_s = min(self.limits.load_wait_s, _UNLOAD_WAIT_S)
        deadline = self._worker.clock() + wait_s
        with self._worker.changed:
            if entry.resident is None:
                return 0
            if entry.pinned and not force:
                raise ModelPinned(f"model {entry.spec.id} is pinned", param="force")
            if entry.num_leases and not force:
                raise ModelBusy(f"model {entry.spec.id} is in use", param="force")
            entry.is_leaving = True
            self._worker.wake()
            while entry.is_leaving:
                left = deadline - self._worker.clock()
                if left <= 0:
                    entry.stays()
                    self._worker.changed.notify_all()
                    raise ModelBusy(
                        f"model {entry.spec.id} is still in use after {wait_s:g} s; "
                        "ask again once its answers have ended",
                        param="force",
                    )
                self._worker.changed.wait(left)
            return entry.freed_bytes

    def try_again(self, name: str) -> None:
        """Let the next request load a model anew, although its last load failed."""
        entry = self._entry(name)
        with self._worker.changed:
            entry.failed_at = -math.inf

    def set_pinned(self, name: str, *, pinned: bool) -> None:
        """Keep a model whatever room is short of, or no longer."""
        entry = self._entry(name)
        with self._worker.changed:
            entry.pinned = pinned
            self._worker.changed.notify_all()  # some may wait in vain now

    def set_ttl(self, name: str, ttl_s: float | None) -> None:
        """After so many idle seconds it leaves; None: as MODEL_TTL_SECONDS says."""
        entry = self._entry(name)
        with self._worker.changed:
            entry.ttl_s = ttl_s

    def rescan(self, *, at_once: bool) -> bool:
        """
        Look for models anew; what is gone and loaded leaves when its requests end.

        Args:
            at_once: however short ago the last look was.
        Returns:
            Whether it was time for it.
        """
        with self._worker.changed:
            if not at_once and self._worker.clock() - self._found_at < _RESCAN_S:
                return False
            self._found_at = self._worker.clock()
        try:
            catalog = self._find()
        except ConfigError as error:  # of the settings file, as it is now
            logger.warning("what was found before is served: %s", error)
            return False
        with self._worker.changed:
            self._names = catalog.names
            self._worker.spec(catalog.specs)
        return True

    def watch_load(self, name: str, longest_s: float) -> LoadSteps:
        """
        Each step of a model's load as it begins, None where nothing changes.

        The last is `ready`, or `error` with why.
        """
        yield from self._waits.watch(self._entry(name), longest_s)

    def drain(self) -> None:
        """Take no new work; who waits for a model is answered."""
        with self._worker.changed:
            self._waits.is_draining = True
            self._worker.changed.notify_all()

    def stop(self) -> None:
        """Have what runs end."""
        self.is_stopped = True

    def close(self, load_wait_s: float = LOAD_END_S) -> bool:
        """
        Let every model go; False if a load goes on all the same. Repeatable.

        Args:
            load_wait_s: how long the end of a load in hand is waited for.
        """
        has_ended = self._worker.close(load_wait_s)
        for entry in self._worker.entries.values():
            if entry.resident is not None:
                entry.resident.close()
                entry.resident, entry.state = None, "unloaded"
        return has_ended

    def _entry(self, name: str) -> ModelState[E]:
        own_id = self._resolve(name)
        with self._worker.changed:
            if (entry := self._worker.entries.get(own_id)) is None:
                raise gone(own_id)
            return entry
