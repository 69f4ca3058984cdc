"""
Locks that notice the order they are taken in.

While `watched_locks` is open, every lock that the sidecar's code makes is one of these.
Two locks taken in both orders, on whatever threads, may some day wait for each other.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sidecar.engine.gpu_thread import GpuThread

# engine-pool.md s7a, by the module that makes the lock.
DECLARED = (
    "sidecar.residents.pool", "sidecar.kv.prefix_store", "sidecar.memory.lineage",
    "sidecar.memory.session_turn_store", "sidecar.memory.healing_store",
    "sidecar.infra.metrics",
)  # fmt: skip


class LockOrder:
    """What was taken while what was held, by the module that made the lock."""

    def __init__(self) -> None:
        self.pairs: dict[str, set[str]] = defaultdict(set)
        self.num_taken = 0
        self.held_while_waiting: set[str] = set()
        self._held = threading.local()

    def taken(self, name: str) -> None:
        """Note a lock just taken by this thread."""
        for other in self.held:
            self.pairs[other].add(name)
        self.held.append(name)
        self.num_taken += 1

    def given_back(self, name: str) -> None:
        """Note a lock given back by this thread."""
        self.held.remove(name)

    @property
    def held(self) -> list[str]:
        """What this thread holds."""
        if not hasattr(self._held, "names"):
            self._held.names = []
        names: list[str] = self._held.names
        return names

    def violations(self) -> list[str]:
        """Circles, the declared order reversed, waits for the GPU with a lock held."""
        found = [f"{name} held while waiting for the GPU" for name in
                 sorted(self.held_while_waiting)]  # fmt: skip
        for first, later in self.pairs.items():
            for second in later:
                if first in self._reached_from(second):
                    found.append(f"{first} <-> {second}")
                if _is_reversed(first, second):
                    found.append(f"{second} taken while {first} is held")
        return found

    def _reached_from(self, start: str) -> set[str]:
        reached: set[str] = set()
        todo = [start]
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                todo += self.pairs.get(name, ())
        return reached


class WatchedLock:
    """threading.Lock that reports to a `LockOrder`."""

    def __init__(self, order: LockOrder, name: str) -> None:
        self._order, self._name = order, name
        self._lock = _make_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading.Lock."""
        is_taken = self._lock.acquire(blocking, timeout)
        if is_taken:
            self._order.taken(self._name)
        return is_taken

    def release(self) -> None:
        """As threading.Lock."""
        self._order.given_back(self._name)
        self._lock.release()

    def locked(self) -> bool:
        """As threading.Lock."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_make_lock = threading.Lock
_make_condition = threading.Condition


@contextmanager
def watched_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[LockOrder]:
    """Watch the locks that the sidecar makes meanwhile."""
    order = LockOrder()

    def lock() -> Any:
        name = _maker()
        return WatchedLock(order, name) if name else _make_lock()

    def condition(own: Any = None) -> Any:
        name = _maker()
        watched = WatchedLock(order, name) if name and own is None else own
        return _make_condition(watched)

    call = GpuThread.call

    def checked_call(gpu: GpuThread, *args: Any, **kwargs: Any) -> Any:
        order.held_while_waiting.update(order.held)
        return call(gpu, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", lock)
        patch.setattr(threading, "Condition", condition)
        patch.setattr(GpuThread, "call", checked_call)
        yield order


def _is_reversed(first: str, second: str) -> bool:
    if first not in DECLARED or second not in DECLARED:
        return False
    return DECLARED.index(first) >= DECLARED.index(second)


def _maker() -> str:
    """The sidecar's module that is making a lock; "" if it is other code."""
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return name if name.startswith("sidecar.") else ""
