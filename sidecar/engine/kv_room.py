"""
Room in KV buffers, made before the step that needs it and layer by layer.

mlx-lm's layers grow within a step, by 256 tokens. On CUDA that step has a graph that no
other has, which is made anew: 80 to 110 ms on an H100, 850 once, where a step takes 12.
A buffer that grows in a graph of its own has that of the layer before it.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from sidecar.kv.kv_layers import KVLayers

_STEP = 256  # tokens, as in mlx-lm


def make_room(cache: KVLayers, num_tokens: int, step: int = _STEP) -> None:
    """
    Let the plain layers hold so many tokens more without growing.

    Args:
        step: each buffer is as long as the next multiple of this, or longer.
    """
    for layer in _plain(cache):
        length = -(-(_depth(layer) + num_tokens) // step) * step
        if length <= layer.keys.shape[2]:
            return  # all are equally deep
        _grow(layer, length)


def _plain(cache: KVLayers) -> Iterator[Any]:
    for layer in cache:
        if type(layer) is CacheList:
            yield from _plain(layer.caches)
        elif type(layer) in (KVCache, BatchKVCache) and layer.keys is not None:
            yield layer


def _depth(layer: Any) -> int:
    depth: int = layer._idx if type(layer) is BatchKVCache else layer.offset
    return depth


def _grow(layer: Any, length: int) -> None:
    layer.keys, layer.values = (
        _grown(array, length) for array in (layer.keys, layer.values)
    )
    mx.async_eval(layer.keys, layer.values)  # type: ignore[no-untyped-call]


def _grown(array: mx.array, length: int) -> mx.array:
    rows, heads, size, width = array.shape
    room = mx.zeros((rows, heads, length - size, width), array.dtype)
    return mx.concatenate([array, room], axis=2)
