"""
Chooses which idle models are unloaded for another's weights, and frees their memory.

Pure but for `settle` and `loading`: decides under the pool's lock, from sizes that the
caller holds.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from sidecar.core.format_bytes import format_bytes
from sidecar.engine.loading.checkpoint_files import (
    MemoryLimit,
    memory_fault,
)
from sidecar.residents.model_state import ModelSpec, ModelState, ServedModel

logger = logging.getLogger(__name__)

_CHOICE_SHARE = 0.1  # of what is missing: who gives less goes only if nobody gives more
_CAME_BACK = 0.9
_POLL_S = 0.05
_NEW, _OLD = 0.3, 0.7  # of the seconds a GB takes to load
_GB = 1e9


class Weights(Protocol):
    """The memory that weights are in. Any thread."""

    @property
    def limit(self) -> MemoryLimit:
        """What all weights together may take."""

    def unaccounted(self, num_bytes: int) -> int:
        """Bytes in use beside stored KV and so many of weights."""

    def is_pressed(self) -> bool:
        """Whether the process is so near its limit that an idle model has to go."""

    def loading(
        self, num_bytes: int
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Reserve a load's bytes until they are there, and make room for them."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """
    How many models, and how long.

    Args:
        max_models: loaded at once; 0: any number.
        headroom: share of a model's size that should stay free for its KV.
        load_wait_s: how long a request waits for a load or for room.
        settle_s: how long freed memory is waited for.
        ttl_s: idle seconds after which a model leaves; 0: never.
        preload: names of models that are loaded at the start.
        pinned: names of those that never leave; what nobody has is said at the start.
    """

    max_models: int = 0
    headroom: float = 0.25
    load_wait_s: float = 900.0
    settle_s: float = 10.0
    ttl_s: float = 0.0
    preload: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()


E = TypeVar("E", bound=ServedModel)


@dataclass(frozen=True, slots=True)
class EvictionPlan(Generic[E]):
    """What a load needs next: a victim to leave, or nothing, or (neither) patience."""

    victim: ModelState[E] | None
    fits: bool


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """Bytes that did not come back, and what was unaccounted for before they left."""

    num_bytes: int
    base: int


class WeightEviction(Generic[E]):
    """
    Decides who stays.

    Args:
        wait, clock: sleeps and tells the time. For tests.
    """

    def __init__(
        self,
        weights: Weights,
        limits: PoolLimits,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights = weights
        self.limits = limits
        self._wait = wait
        self._clock = clock
        self._unsettled = _Unsettled(0, 0)
        self._load_s_per_gb: float | None = None

    def too_large(self, spec: ModelSpec) -> str | None:
        """Why it never fits, not even alone."""
        fault = memory_fault(spec.size_bytes, self._weights.limit)
        name = spec.id.removeprefix("openai/")
        return f"model {name} cannot be loaded: {fault}" if fault else None

    def plan(
        self, wanted: ModelState[E], entries: Sequence[ModelState[E]]
    ) -> EvictionPlan[E]:
        """What has to happen before a model can be loaded."""
        held = [entry for entry in entries if entry.resident is not None]
        size, limit = wanted.spec.size_bytes, self._weights.limit.num_bytes
        bare = self._used(held) + size - limit
        missing = bare + int(size * self.limits.headroom)
        maximum = self.limits.max_models
        is_crowded = bool(maximum) and len(held) >= maximum
        if missing <= 0 and not is_crowded:
            return EvictionPlan(None, fits=True)
        # Nobody leaves in vain: not for what would not fit all the same.
        could = sum(entry.held_bytes for entry in held if entry.is_idle)
        victim = self._victim(held, max(0, missing)) if could >= bare else None
        if victim is not None:
            return EvictionPlan(victim, fits=False)
        return EvictionPlan(None, fits=bare <= 0 and not is_crowded)

    def is_taken(self, wanted: ModelState[E], entries: Iterable[ModelState[E]]) -> bool:
        """Whether pinned models alone leave no room, so that waiting is in vain."""
        stay = [e for e in entries if e.held_bytes and e.pinned and not e.is_leaving]
        size = wanted.spec.size_bytes + sum(entry.held_bytes for entry in stay)
        maximum = self.limits.max_models
        return size > self._weights.limit.num_bytes or 0 < maximum <= len(stay)

    def oldest(self, entries: Iterable[ModelState[E]]) -> ModelState[E] | None:
        """Who has to go under pressure."""
        return self._victim([e for e in entries if e.resident is not None], 0)

    def is_pressed(self) -> bool:
        """Whether an idle model has to go."""
        return self._weights.is_pressed()

    def shortage(self, wanted: ModelState[E], entries: Iterable[ModelState[E]]) -> str:
        """Why there was no room: what it needs, the limit, and who holds it."""
        holders = [
            f"{e.spec.id} {format_bytes(e.held_bytes)}"
            + (" (pinned)" if e.pinned else f" ({e.num_leases} in use)")
            for e in entries
            if e.resident is not None
        ]
        limit = format_bytes(self._weights.limit.num_bytes)
        return (
            f"model {wanted.spec.id} needs {format_bytes(wanted.spec.size_bytes)} of "
            f"{limit}, held by: {', '.join(holders)}"
        )

    def settle(self, resident: E, entries: Sequence[ModelState[E]]) -> int:
        """
        Close a model and wait until its bytes are back; how many are.

        What does not come back in time stays counted, until a later look finds it free.
        """
        size, held = resident.num_bytes, sum(entry.held_bytes for entry in entries)
        before = self._weights.unaccounted(held)
        freed = resident.close()
        deadline = self._clock() + self.limits.settle_s
        while freed < _CAME_BACK * size and self._clock() < deadline:
            self._wait(_POLL_S)
            left = self._weights.unaccounted(held - size) - before
            freed = max(freed, size - max(0, left))
        if freed < _CAME_BACK * size:
            last = self._unsettled
            base = min(before, last.base) if last.num_bytes else before
            self._unsettled = _Unsettled(last.num_bytes + size - freed, base)
            logger.warning(
                "%s of a model did not come back", format_bytes(size - freed)
            )
        return freed

    def loading(
        self, wanted: ModelState[E]
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """While a model is loaded; what is yielded says that its bytes are there."""
        return self._weights.loading(wanted.spec.size_bytes)

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Measure a load."""
        if num_bytes <= 0:
            return
        now = seconds / (num_bytes / _GB)
        last = self._load_s_per_gb
        self._load_s_per_gb = now if last is None else _NEW * now + _OLD * last

    def load_s(self, num_bytes: int) -> float | None:
        """What a load would take; None before the first one."""
        rate = self._load_s_per_gb
        return None if rate is None else round(rate * num_bytes / _GB, 2)

    def _used(self, held: Iterable[ModelState[E]]) -> int:
        """Bytes of weights, those included that were let go and have not come back."""
        known = sum(entry.held_bytes for entry in held)
        last = self._unsettled
        if last.num_bytes:
            left = max(0, self._weights.unaccounted(known) - last.base)
            self._unsettled = replace(last, num_bytes=min(last.num_bytes, left))
        return known + self._unsettled.num_bytes

    def _victim(
        self, held: Iterable[ModelState[E]], missing: int
    ) -> ModelState[E] | None:
        idle = sorted((e for e in held if e.is_idle), key=lambda e: e.last_access)
        enough = [e for e in idle if e.held_bytes >= _CHOICE_SHARE * missing]
        return next(iter(enough or idle), None)
