"""
KV kept for the next turn: exact prefixes only.

A stored sequence serves a prompt that begins with the very same ids; where every
layer can be cut back, a common beginning is enough.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from sidecar.cache.kv_layers import (
    KVLayers,
    copy_layers,
    is_sliceable,
    nbytes,
    trim_to,
)
from sidecar.core.prompt import ModelIds


class Restored(NamedTuple):
    """KV of the first `cached_len` ids of a prompt, free to be advanced."""

    cache: KVLayers
    cached_len: int


@dataclass(eq=False)
class _Entry:
    ids: ModelIds
    cache: KVLayers
    sliceable: bool
    num_bytes: int
    touched: float = field(default_factory=time.monotonic)

    def usable_len(self, ids: ModelIds) -> int:
        common = common_prefix_len(self.ids, ids)
        if not self.sliceable and common < len(self.ids):
            return 0
        usable = min(common, len(ids) - 1)
        return usable if self.sliceable or usable == len(self.ids) else 0


class PrefixStore:
    """
    Whole sequences under their ids, least recently used out first.

    `match_len` may be called from any thread; all else on the GPU thread.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored KV."""
        with self._lock:
            return sum(entry.num_bytes for entry in self._entries)

    def match_len(self, model_ids: ModelIds) -> int:
        """Length in tokens of the longest stored prefix; at most `len - 1`."""
        with self._lock:
            return max((e.usable_len(model_ids) for e in self._entries), default=0)

    def restore(self, model_ids: ModelIds) -> Restored | None:
        """The KV of the longest stored prefix, or None."""
        with self._lock:
            best = max(
                self._entries, key=lambda e: e.usable_len(model_ids), default=None
            )
        length = best.usable_len(model_ids) if best else 0
        if best is None or length == 0:
            return None
        best.touched = time.monotonic()
        cache = copy_layers(best.cache)
        if length < len(best.ids):
            trim_to(cache, len(best.ids), length)
        return Restored(cache, length)

    def insert(self, ids: ModelIds, cache: KVLayers) -> None:
        """
        Keep `cache`, which holds exactly `ids`, and takes it over.

        Sliceable sequences that this one extends are dropped: it serves them too.
        """
        if not ids:
            return
        entry = _Entry(ids, cache, is_sliceable(cache), nbytes(cache))
        with self._lock:
            self._entries = [
                old
                for old in self._entries
                if not (
                    old.ids == ids
                    or (entry.sliceable and ids[: len(old.ids)] == old.ids)
                )
            ]
            self._entries.append(entry)
            self._evict()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def _evict(self) -> None:
        self._entries.sort(key=lambda e: e.touched)
        total = sum(e.num_bytes for e in self._entries)
        while self._entries and (
            total > self._max_bytes or len(self._entries) > self._max_entries
        ):
            total -= self._entries.pop(0).num_bytes


def common_prefix_len(a: ModelIds, b: ModelIds) -> int:
    """Length of the common beginning, by bisection over slice comparisons."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
