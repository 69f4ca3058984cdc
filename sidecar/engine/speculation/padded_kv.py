"""
KV whose attention has one shape for many steps.

On CUDA the attention of several tokens is planned by cuDNN for each number of tokens
and each length of the keys anew: 60 to 80 ms a call on an H100, where a token takes 10.
So a run of drafted tokens has always the same length, and attends to the buffer as far
as the next multiple of 1,024: a mask hides what is not written yet. The plan is made
once for all of that; a call takes 15 to 18 ms, whether it has 2 tokens or 17.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from sidecar.engine.speculation.draft_length import LENGTHS
from sidecar.kv.kv_layers import KVLayers, make_room

_STEP = 1024
LONGEST_RUN = LENGTHS[-1] + 1  # a drawn token, and what is drafted behind it


def filled(run: list[int]) -> list[int]:
    """A run with its last token again and again, as long as the longest."""
    return [*run, *[run[-1]] * (LONGEST_RUN - len(run))]


def padded(cache: KVLayers, num_tokens: int) -> KVLayers:
    """
    The same layers, for one call of so many tokens.

    What is written goes into the layers themselves. Others than plain KV are as they
    were.
    """
    make_room(cache, num_tokens, _STEP)
    return [_padded(layer, num_tokens) for layer in cache]


def _padded(layer: Any, num_tokens: int) -> Any:
    if type(layer) is CacheList:
        return CacheList(*(_padded(one, num_tokens) for one in layer.caches))
    if type(layer) is not KVCache or layer.keys is None:
        return layer
    return PaddedKV(layer, -(-(layer.offset + num_tokens) // _STEP) * _STEP)


class PaddedKV:
    """
    A plain KV layer as a model's attention knows it.

    Args:
        length: of the keys and values that are attended to, written or not.
    """

    def __init__(self, layer: KVCache, length: int) -> None:
        self._layer, self._length = layer, length

    @property
    def offset(self) -> int:
        """How many tokens it holds."""
        return int(self._layer.offset)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Write, and give all of the buffer up to the length."""
        layer = self._layer
        layer.update_and_fetch(keys, values)
        end = self._length
        return layer.keys[..., :end, :], layer.values[..., :end, :]

    def make_mask(
        self, count: int, window_size: int | None = None, **_: object
    ) -> mx.array:
        """Which of the buffer each of so many tokens may see: (tokens, length)."""
        rows = self.offset + mx.arange(count)[:, None]
        columns = mx.arange(self._length)[None]
        seen = columns <= rows
        return seen if window_size is None else seen & (columns > rows - window_size)
