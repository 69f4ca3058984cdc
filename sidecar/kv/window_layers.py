"""
Layers that keep a window: the first tokens of a prompt, and its last ones.

A context that rotates forgets its middle. The first few tokens stay, for attention
rests on them whatever they say (Xiao and others, 2023: attention sinks). A token sees
the same keys whether it comes alone or in a chunk, so an answer does not depend on how
its prompt is cut.
"""

from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from sidecar.kv.kv_layers import KVLayers, atoms

NUM_FIRST = 4  # tokens that are never forgotten
SMALLEST_WINDOW = 16


class WindowKVCache(RotatingKVCache):  # type: ignore[misc]
    """mlx-lm's rotating layer, whose first tokens are seen by each token of a chunk."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size, keep=NUM_FIRST)

    def make_mask(
        self, num_new: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        """
        Which keys the next tokens see; asked before they are written.

        Args:
            num_new: how many they are. window_size: of the model's own, if it has one.
        Returns:
            None for all, "causal", or an array of shape (num_new, keys).
        """
        if num_new == 1:
            return None if window_size is None else self._own_window(window_size)
        held = min(self.max_size - 1, self.offset)
        if held + num_new <= min(self.max_size, window_size or self.max_size):
            return super().make_mask(num_new, None, True) if return_array else "causal"
        keys = mx.arange(held + num_new)[None]
        queries = mx.arange(held, held + num_new)[:, None]
        num_last = self.max_size - self.keep
        seen = (queries >= keys) & ((keys < self.keep) | (queries < keys + num_last))
        if window_size is not None:
            forgotten = self.offset - held  # places between the first ones and the rest
            places = mx.where(keys < self.keep, keys, keys + forgotten)
            seen &= queries + forgotten < places + window_size
        return seen

    def _own_window(self, window_size: int) -> mx.array | None:
        """What the next token sees through a window of the model's own."""
        if self.offset < window_size:
            return None
        places = mx.arange(min(self.offset + 1, self.max_size))
        if self.offset >= self.max_size:
            written = self._idx if self._idx < self.max_size else self.keep
            age = (written - places) % (self.max_size - self.keep)
            places = mx.where(places < self.keep, places, self.offset - age)
        return cast(mx.array, places > self.offset - window_size)


def windowed(cache: KVLayers) -> KVLayers:
    """
    The same layers, of which the plain ones keep no more tokens than they hold now.

    The arrays are shared until one of the two is written to.
    """
    return [_windowed(layer) for layer in cache]


def forgets(cache: KVLayers) -> bool:
    """Whether any layer is such a window; a recurrent one forgets by itself."""
    return any(isinstance(atom, WindowKVCache) for atom in atoms(cache))


def _windowed(layer: Any) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*map(_windowed, layer.caches))
    if type(layer) is not KVCache or layer.keys is None:
        return layer
    window = WindowKVCache(layer.offset)
    window.keys = layer.keys[..., : layer.offset, :]
    window.values = layer.values[..., : layer.offset, :]
    window.offset = window._idx = layer.offset
    return window
