"""
The only surgery on KV caches: copy, cut, depth, bytes, batch form.

A "cache" here is mlx-lm's list with one object per layer, for one sequence.
"""

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

KVLayers = list[Any]


def copy_layers(cache: KVLayers) -> KVLayers:
    """
    A cache that can be advanced while the original stays as it is.

    Costs no memory until one of the two is written to. deepcopy, because a slice
    assignment changes the array object in place and two caches must not share one.
    """
    return copy.deepcopy(cache)


def is_sliceable(cache: KVLayers) -> bool:
    """Whether every layer can be cut back to any depth."""
    return all(layer.is_trimmable() for layer in cache)


def trim_to(cache: KVLayers, depth: int, target: int) -> None:
    """Cut a sliceable cache of `depth` tokens back to `target` tokens, in place."""
    for layer in cache:
        if layer.trim(depth - target) != depth - target:
            raise ValueError(f"a layer could not be cut from {depth} to {target}")


def nbytes(cache: KVLayers) -> int:
    """Bytes of all layers, padding included."""
    return sum(layer.nbytes for layer in cache)


def evaluate(cache: KVLayers) -> None:
    """Compute all pending state."""
    mx.eval([layer.state for layer in cache])


def to_batch(cache: KVLayers) -> KVLayers:
    """
    A batch cache of one row that takes over the arrays of `cache`.

    A plain KV layer moves without a copy and keeps the room it has; mlx-lm's own
    merge would copy it into an exactly sized buffer, and again at the first token.
    """
    return [
        _adopt(layer) if type(layer) is KVCache else layer.merge([layer])
        for layer in cache
    ]


def _adopt(layer: Any) -> Any:
    batch = BatchKVCache([0])
    batch.keys, batch.values = layer.keys, layer.values
    batch.offset = mx.array([layer.offset])
    batch._idx = layer.offset
    return batch
