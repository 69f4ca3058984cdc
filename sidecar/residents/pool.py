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
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from sidecar.core.errors import (
    InsufficientMemory,
    ModelBusy,
    ModelLoadFailed,
    ModelNotFound,
    ModelPinned,
    ModelTooLarge,
    SidecarError,
    Unavailable,
)
from sidecar.residents.catalog import Catalog
from sidecar.residents.model_entry import Entry, ModelEntry, Offer
from sidecar.residents.room import PoolLimits, Room, Weights

logger = logging.getLogger(__name__)

_RETRY_FAILED_S = 60.0
_WATCH_S = 1.0
_LOOK_EVERY_S = 5.0  # for idle models whose time is up, and for pressure


class Loadable(Protocol):
    """What the pool asks of a loaded model."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, measured."""

    def close(self) -> int:
        """Give its weights back; the bytes."""


E = TypeVar("E", bound=Loadable)
Tell = Callable[[str], None]


class ResidentPool(Generic[E]):
    """
    Loads models, leases them out, lets them go. Safe from any thread.

    Args:
        catalog: what can be served, and how requests name it.
        load: makes a resident of an offer, telling its steps; may take minutes.
        weights: the memory that weights are in.
        clock: seconds. For tests.
    """

    def __init__(
        self,
        catalog: Catalog,
        load: Callable[[Offer, Tell], E],
        weights: Weights,
        limits: PoolLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = catalog.names
        self._load = load
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._entries = {offer.id: Entry[E](offer) for offer in catalog.offers}
        self._room = Room[E](weights, limits)
        self._is_draining = self._is_closed = False
        self._thread: threading.Thread | None = None

    # What there is.

    def entries(self) -> tuple[ModelEntry, ...]:
        """All models, the default one first."""
        with self._changed:
            now, seconds = self._clock(), self._room.load_s
            rows = sorted(
                self._entries.values(), key=lambda e: e.offer.id != self._names.default
            )
            return tuple(row.seen(now, seconds(row.offer.size_bytes)) for row in rows)

    def entry(self, name: str) -> ModelEntry:
        """
        The model that a name means; "": the default one.

        Raises:
            ModelNotFound: no served model has that name.
        """
        own_id = self._names.resolve(name)
        return next(entry for entry in self.entries() if entry.id == own_id)

    @property
    def num_leases(self) -> int:
        """Requests that hold a model."""
        with self._changed:
            return sum(entry.num_leases for entry in self._entries.values())

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new work."""
        return self._is_draining

    def loaded(self) -> tuple[E, ...]:
        """Loaded models, without a lease: for a look at numbers."""
        with self._changed:
            found = (entry.resident for entry in self._entries.values())
            return tuple(resident for resident in found if resident is not None)

    # Requests.

    def start_loading(self) -> None:
        """Begin to load what is wanted from the start, the default one first."""
        pinned = [entry.offer.id for entry in self._all() if entry.pinned]
        for name in ("", *pinned, *self._limits.preload):
            try:
                self._want(self._names.resolve(name))
            except ModelNotFound as error:
                logger.warning("PRELOAD_MODELS: %s", error)

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[E]:
        """
        Hold a model for the length of a request; it is loaded if it has to be.

        Raises:
            ModelNotFound: no served model has that name.
            Unavailable: it is still loading after LOAD_WAIT_SECONDS.
            InsufficientMemory, ModelTooLarge: there is no room for it.
            ModelLoadFailed: its load failed.
        """
        entry = self._entry(name)
        resident = self._take(entry)
        try:
            yield resident
        finally:
            with self._changed:
                entry.num_leases -= 1
                entry.last_access = self._clock()
                self._changed.notify_all()

    def _take(self, entry: Entry[E]) -> E:
        """Wait until it is loaded, and count a lease."""
        deadline = self._clock() + self._limits.load_wait_s
        with self._changed:
            self._check_loadable(entry)
            seen = entry.num_failures
            while entry.resident is None or entry.state == "unloading":
                self._wish(entry)
                left = deadline - self._clock()
                if left <= 0 or self._is_closed:
                    raise self._late(entry)
                self._changed.wait(left)
                if entry.num_failures != seen:
                    raise self._failure(entry)
            entry.num_leases += 1
            entry.last_access = self._clock()
            return entry.resident

    def _check_loadable(self, entry: Entry[E]) -> None:
        if entry.offer.fault:
            raise ModelLoadFailed(entry.offer.fault)
        if entry.resident is None and (fault := self._room.too_large(entry.offer)):
            raise ModelTooLarge(fault)
        since = self._clock() - entry.failed_at
        if entry.state == "failed" and since < _RETRY_FAILED_S:
            raise self._failure(entry)

    def _failure(self, entry: Entry[E]) -> SidecarError:
        """Why the last load failed, for one more request."""
        last = entry.failure or ModelLoadFailed("the model could not be loaded")
        again = type(last)(last.message, param=last.param)
        again.retry_after_s = last.retry_after_s
        return again

    def _late(self, entry: Entry[E]) -> Unavailable:
        """Why it is not there: it loads, or nothing may leave for it."""
        if entry.state == "loading" or self._is_closed:
            return Unavailable("the model is still loading", retry_after_s=10)
        entry.is_wanted = False  # nobody waits for it any more; who does wishes again
        self._changed.notify_all()
        others = self._entries.values()
        return InsufficientMemory(
            self._room.shortage(entry, others), param="model", retry_after_s=10
        )

    # What people do by hand.

    def load(self, name: str, *, pin: bool = False) -> ModelEntry:
        """
        Load a model now and wait for it.

        Raises:
            As `lease`.
        """
        entry = self._entry(name)
        with self._changed:
            if entry.state == "failed":
                entry.state = "unloaded"  # asked for by hand: at once
            entry.pinned = entry.pinned or pin
        with self.lease(name):
            return self.entry(name)

    def unload(self, name: str, *, force: bool = False) -> int:
        """
        Let a model go now; the bytes that came back.

        Args:
            force: wait for its leases, and take a pinned one.
        Raises:
            ModelPinned, ModelBusy: not without `force`; or still busy.
        """
        entry = self._entry(name)
        deadline = self._clock() + self._limits.load_wait_s
        with self._changed:
            if entry.resident is None:
                return 0
            if entry.pinned and not force:
                raise ModelPinned(f"model {entry.offer.id} is pinned", param="force")
            if entry.num_leases and not force:
                raise ModelBusy(f"model {entry.offer.id} is in use", param="force")
            entry.is_leaving = True
            self._wake()
            while entry.is_leaving:
                left = deadline - self._clock()
                if left <= 0:
                    entry.is_leaving = False
                    raise ModelBusy(f"model {entry.offer.id} is in use", param="force")
                self._changed.wait(left)
            return entry.freed_bytes

    def set_pinned(self, name: str, *, pinned: bool) -> None:
        """Keep a model whatever room is short of, or no longer."""
        entry = self._entry(name)
        with self._changed:
            entry.pinned = pinned

    def set_ttl(self, name: str, ttl_s: float | None) -> None:
        """After so many idle seconds it leaves; None: as MODEL_TTL_SECONDS says."""
        entry = self._entry(name)
        with self._changed:
            entry.ttl_s = ttl_s

    def offer(self, catalog: Catalog) -> None:
        """Serve this from now on; what is loaded stays until it leaves by itself."""
        with self._changed:
            self._names = catalog.names
            wanted = {offer.id: offer for offer in catalog.offers}
            for own_id, entry in list(self._entries.items()):
                if own_id in wanted:
                    entry.offer = wanted.pop(own_id)
                elif entry.resident is None:
                    del self._entries[own_id]
            for own_id, offer in wanted.items():
                self._entries[own_id] = Entry[E](offer)
            self._changed.notify_all()

    def watch_load(
        self, name: str, longest_s: float
    ) -> Iterator[tuple[str, str | None] | None]:
        """
        Each step of a model's load as it begins, None where nothing changes.

        The last is `ready`, or `error` with why.
        """
        entry, told = self._entry(name), ""
        deadline = self._clock() + longest_s
        while self._clock() < deadline:
            with self._changed:
                if entry.state == "loaded":
                    step: str | None = "ready"
                elif entry.state == "failed":
                    step = "error"
                else:
                    step = entry.step
                failure = entry.failure
                is_new = step and step != told
                if not is_new:
                    self._changed.wait(_WATCH_S)
            if not step or not is_new:
                yield None
                continue
            told = step
            yield step, failure.message if step == "error" and failure else None
            if step in ("ready", "error"):
                return

    def drain(self) -> None:
        """Take no new work."""
        self._is_draining = True

    def close(self) -> None:
        """Let every model go. Repeatable."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for entry in self._entries.values():
            if entry.resident is not None:
                entry.resident.close()
                entry.resident, entry.state = None, "unloaded"

    # The pool's own thread.

    def look(self) -> None:
        """Mark what was idle for its time, and what has to go under pressure."""
        with self._changed:
            now = self._clock()
            for entry in self._entries.values():
                ttl_s = self._limits.ttl_s if entry.ttl_s is None else entry.ttl_s
                if ttl_s and entry.is_idle and now - entry.last_access > ttl_s:
                    entry.is_leaving = True
            if self._room.is_pressed() and (victim := self._room.oldest(self._all())):
                logger.warning("memory is short: unloading model=%s", victim.offer.id)
                victim.is_leaving = True

    def _all(self) -> list[Entry[E]]:
        return list(self._entries.values())

    def _entry(self, name: str) -> Entry[E]:
        own_id = self._names.resolve(name)
        with self._changed:
            return self._entries[own_id]

    def _want(self, own_id: str) -> None:
        with self._changed:
            entry = self._entries[own_id]
            fault = entry.offer.fault or self._room.too_large(entry.offer)
            if fault and own_id != self._names.default:
                logger.warning("not loaded at the start: %s", fault)
            elif entry.resident is None and not entry.offer.fault:
                self._wish(entry)

    def _wish(self, entry: Entry[E]) -> None:
        """Have the pool's thread load it; holds the lock."""
        if not entry.is_wanted and entry.state not in ("loading", "loaded"):
            entry.is_wanted, entry.wanted_at = True, self._clock()
            if entry.state == "failed":
                entry.state = "unloaded"
        self._wake()

    def _wake(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (task := self._next()) is None and not self._is_closed:
                    if not self._changed.wait(_LOOK_EVERY_S):
                        self.look()
                if self._is_closed:
                    return
            assert task is not None
            task()

    def _next(self) -> Callable[[], None] | None:
        """The next thing to do; holds the lock."""
        for entry in self._entries.values():
            if entry.is_leaving and entry.resident is not None and not entry.num_leases:
                return lambda: self._unload(entry)
        wanted = [entry for entry in self._entries.values() if entry.is_wanted]
        for entry in sorted(wanted, key=lambda entry: entry.wanted_at):
            plan = self._room.plan(entry, self._all())
            if plan.victim is not None:
                victim = plan.victim
                return lambda: self._unload(victim)
            if plan.fits:
                return lambda: self._run_load(entry)
        return None

    def _unload(self, entry: Entry[E]) -> None:
        with self._changed:
            resident = entry.resident
            if resident is None or entry.num_leases:
                return
            entry.state = "unloading"
        freed = self._room.settle(resident, self._all())
        logger.info("unloaded model=%s bytes=%d", entry.offer.id, freed)
        with self._changed:
            entry.unloaded(freed)
            self._changed.notify_all()

    def _run_load(self, entry: Entry[E]) -> None:
        with self._changed:
            entry.is_wanted, entry.state, entry.step = False, "loading", "starting"
            self._changed.notify_all()

        def tell(step: str) -> None:
            with self._changed:
                entry.step = step
                self._changed.notify_all()

        resident: E | None = None
        failure: SidecarError = ModelLoadFailed("the model could not be loaded")
        started = self._clock()
        try:
            with self._room.loading(entry):
                resident = self._load(entry.offer, tell)
        except SidecarError as error:
            # Who asked for it says it in one sentence; where it was is for developers.
            logger.debug("load failed model=%s", entry.offer.id, exc_info=True)
            failure = error
        except Exception as error:
            logger.exception("load failed model=%s", entry.offer.id)
            failure = ModelLoadFailed(f"the model could not be loaded: {error}")
        with self._changed:
            now = self._clock()
            if resident is None:
                entry.failed(failure, now)
            else:
                entry.loaded(resident, now)
                self._room.learn(resident.num_bytes, now - started)
            self._changed.notify_all()
