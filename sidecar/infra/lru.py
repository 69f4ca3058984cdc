"""A bounded map, least recently used out first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """
    At most `max_entries` entries of at most `max_weight` in all. Any thread.

    Args:
        weigh: weight of an entry, in whatever unit `max_weight` has.
    """

    def __init__(
        self, max_entries: int, max_weight: int, weigh: Callable[[K, V], int]
    ) -> None:
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._weigh = weigh
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._weight = 0
        self._num_clears = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def weight(self) -> int:
        """Weight of all entries."""
        return self._weight

    def get(self, key: K) -> V | None:
        """The value, now the most recently used; None if there is none."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    @property
    def num_clears(self) -> int:
        """How often all was forgotten."""
        return self._num_clears

    def put(self, key: K, value: V, since: int | None = None) -> None:
        """
        Add or replace an entry; one heavier than everything is not kept.

        Args:
            since: `num_clears` when its making began; what was cleared then stays so.
        """
        weight = self._weigh(key, value)
        with self._lock:
            if since is not None and since != self._num_clears:
                return
            self._drop(key)
            if weight > self._max_weight:
                return
            self._entries[key] = value
            self._weight += weight
            while self._entries and (
                len(self._entries) > self._max_entries
                or self._weight > self._max_weight
            ):
                self._drop(next(iter(self._entries)))

    def pop_oldest(self) -> None:
        """Forget the entry that was used least recently, if there is one."""
        with self._lock:
            if self._entries:
                self._drop(next(iter(self._entries)))

    def pop(self, key: K) -> V | None:
        """Forget an entry; its value, None if it is not there."""
        with self._lock:
            value = self._entries.get(key)
            self._drop(key)
        return value

    def pop_if(self, is_gone: Callable[[K, V], bool]) -> list[K]:
        """Forget some entries; their keys."""
        with self._lock:
            keys = [key for key, value in self._entries.items() if is_gone(key, value)]
            for key in keys:
                self._drop(key)
        return keys

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._num_clears += 1
            self._entries.clear()
            self._weight = 0

    def _drop(self, key: K) -> None:
        if key in self._entries:
            self._weight -= self._weigh(key, self._entries.pop(key))
