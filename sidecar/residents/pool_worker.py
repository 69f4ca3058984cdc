"""
The pool's thread: loads and unloads models, and looks for memory pressure.

So nothing races for the same bytes. Requests say what they want (`wish`) and wait for
`changed`; what leaves by itself, idle for its time or under pressure, is marked by
`poll`.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from sidecar.core.errors import ModelLoadFailed, SidecarError
from sidecar.residents.model_state import ModelSpec, ModelState, ServedModel, Tell
from sidecar.residents.weight_eviction import PoolLimits, WeightEviction

logger = logging.getLogger(__name__)

_BEFORE_WEIGHTS = ("starting", "download_progress", "weights_loading")
LOAD_END_S = 10.0  # of a load in hand, at the end
_LOOK_EVERY_S = 5.0  # for idle models whose time is up, and for pressure

E = TypeVar("E", bound=ServedModel)


class PoolWorker(Generic[E]):
    """
    Moves models in and out.

    `changed` guards the entries and all of this; methods that begin with an underscore
    hold it already, as do `wish` and `poll`.

    Args:
        load: makes a resident of an offer, telling its steps.
        room: decides who leaves. clock: seconds.
    """

    def __init__(
        self,
        specs: tuple[ModelSpec, ...],
        load: Callable[[ModelSpec, Tell], E],
        room: WeightEviction[E],
        limits: PoolLimits,
        clock: Callable[[], float],
    ) -> None:
        self.changed = threading.Condition()
        self.entries = {spec.id: ModelState[E](spec) for spec in specs}
        self.is_closed = False
        self.clock = clock
        self.load = load
        self._room = room
        self.limits = limits
        self._looked_at = clock()
        self._thread: threading.Thread | None = None

    def spec(self, specs: tuple[ModelSpec, ...]) -> None:
        """Have entries for these, and for what is loaded; holds the lock already."""
        wanted = {spec.id: spec for spec in specs}
        for own_id, entry in list(self.entries.items()):
            if own_id in wanted:
                entry.update_spec(wanted.pop(own_id))
            elif entry.resident is None and entry.state != "loading":
                del self.entries[own_id]
            else:  # its files are gone; who holds it may end
                entry.is_available, entry.is_leaving = False, True
        for own_id, spec in wanted.items():
            self.entries[own_id] = ModelState[E](spec)
        self.changed.notify_all()

    def close(self, load_wait_s: float) -> bool:
        """Begin nothing any more; whether what had begun has ended in time."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(load_wait_s)
            return not self._thread.is_alive()
        return True

    def wish(self, entry: ModelState[E]) -> None:
        """Have a model loaded; does not wait."""
        if not entry.is_wanted and entry.state not in ("loading", "loaded"):
            entry.is_wanted, entry.wanted_at = True, self.clock()
            if entry.state == "failed":
                entry.state = "unloaded"
        self.wake()

    def wake(self) -> None:
        """Look for something to do."""
        if self._thread is None and not self.is_closed:
            self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    def poll(self) -> None:
        """Mark what was idle for its time, and what has to go under pressure."""
        now = self.clock()
        for entry in self.entries.values():
            ttl_s = self.limits.ttl_s if entry.ttl_s is None else entry.ttl_s
            if ttl_s and entry.is_idle and now - entry.last_access > ttl_s:
                entry.is_leaving = True
        if self._room.is_pressed() and (
            victim := self._room.oldest(list(self.entries.values()))
        ):
            logger.warning("memory is short: unloading model=%s", victim.spec.id)
            victim.is_leaving = True

    def _run(self) -> None:
        while True:
            with self.changed:
                while (task := self._next()) is None and not self.is_closed:
                    if not self._poll_if_due():
                        self.changed.wait(_LOOK_EVERY_S)
                if self.is_closed:
                    return
            assert task is not None
            try:
                task()
            # Whatever one model does (Rust code of its tokenizer panics with what is no
            # Exception), the others are served.
            except BaseException:
                logger.exception("a model could not be moved")

    def _poll_if_due(self) -> bool:
        """Whether it was time to; however often requests come and go."""
        if self.clock() - self._looked_at < _LOOK_EVERY_S:
            return False
        self._looked_at = self.clock()
        self.poll()
        return True

    def _next(self) -> Callable[[], None] | None:
        """The next thing to do; holds the lock."""
        for entry in self.entries.values():
            if entry.is_leaving and entry.resident is not None and not entry.num_leases:
                return lambda: self._unload(entry)
        wanted = [entry for entry in self.entries.values() if entry.is_wanted]
        for entry in sorted(wanted, key=lambda entry: entry.wanted_at):
            plan = self._room.plan(entry, list(self.entries.values()))
            if plan.victim is not None:
                victim = plan.victim
                return lambda: self._unload(victim)
            if plan.fits:
                return lambda: self._run_load(entry)
        return None

    def _unload(self, entry: ModelState[E]) -> None:
        with self.changed:
            resident = entry.resident
            if resident is None or entry.num_leases:
                return
            entry.state = "unloading"
        freed = 0
        try:
            freed = self._room.settle(resident, list(self.entries.values()))
        except Exception:
            logger.exception("unload failed model=%s", entry.spec.id)
        logger.info("unloaded model=%s bytes=%d", entry.spec.id, freed)
        with self.changed:
            entry.unloaded(freed)
            if not entry.is_available:
                del self.entries[entry.spec.id]
            self.changed.notify_all()

    def _run_load(self, entry: ModelState[E]) -> None:
        with self.changed:
            entry.is_wanted = False
            if self.entries.get(entry.spec.id) is not entry:
                return  # its files went away meanwhile
            entry.state, entry.step = "loading", "starting"
            self.changed.notify_all()
        resident: E | None = None
        failure: SidecarError = ModelLoadFailed("the model could not be loaded")
        started = self.clock()
        try:
            with self._room.loading(entry) as arrived:
                tell = functools.partial(self._tell, entry, arrived)
                resident = self.load(entry.spec, tell)
        except SidecarError as error:
            # Who asked for it says it in one sentence; where it was is for developers.
            logger.debug("load failed model=%s", entry.spec.id, exc_info=True)
            failure = error
        except BaseException as error:  # libraries end the program, or panic
            logger.exception("load failed model=%s", entry.spec.id)
            failure = ModelLoadFailed(f"the model could not be loaded: {error}")
        with self.changed:
            now = self.clock()
            if resident is None:
                entry.failed(failure, now)
                if not entry.is_available:
                    del self.entries[entry.spec.id]
            else:
                entry.loaded(resident, now)
                self._room.learn(resident.num_bytes, now - started)
            self.changed.notify_all()

    def _tell(
        self,
        entry: ModelState[E],
        arrived: Callable[[], None],
        step: str,
        num_bytes: int = 0,
    ) -> None:
        if step not in _BEFORE_WEIGHTS:
            arrived()
        with self.changed:
            is_new, entry.step = entry.step != step, step
            entry.read_bytes = num_bytes
            if is_new:
                self.changed.notify_all()
