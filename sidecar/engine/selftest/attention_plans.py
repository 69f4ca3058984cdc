"""
The attention of a decode step planned ahead for each length of KV buffers, on CUDA.

cuDNN plans the attention of one new token anew for every shape of the keys' buffer
that a process meets: 40 to 80 ms on an H200, and 500 to 900 ms where it compiles a
kernel for it, beside steps of 6 to 10 ms. A stream that grows into the next buffer
would stand still for it. So each length that `buffer_length` gives is met once, between
requests.
"""

import logging
import time
from collections.abc import Generator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv.kv_layers import (
    KVLayers,
    atoms,
    buffer_length,
    evaluate,
    release_freed_memory,
)

logger = logging.getLogger(__name__)

_PROMPT_LEN = 9
_MAX_BYTES = 1 << 30  # of the long layers: longer buffers are planned when they are met


def plan_attention(model: LoadedModel) -> Generator[None, None, int]:
    """
    One decode step for each length of a buffer, in turns; how many there were.

    Only one layer of each shape is as long as that: the plan is the same for all. With
    quantised KV there is nothing to plan, since cuDNN does not attend to it.
    """
    if model.quantization is not None:
        return 0
    started, cache = time.monotonic(), model.new_cache()
    model.forward(mx.array([[0] * _PROMPT_LEN]), cache)
    evaluate(cache)
    chosen = _one_of_each_shape(cache)
    if not chosen:
        return 0
    token_bytes = sum(_token_bytes(layer) for layer in chosen)
    lengths = _lengths(min(model.context_len, _MAX_BYTES // token_bytes))
    for length in lengths:
        for layer in chosen:
            _lengthen(layer, length)
        mx.eval(model.forward(mx.array([[0]]), cache))
        yield
    del cache, chosen
    release_freed_memory()
    logger.info(
        "planned attention lengths=%d seconds=%.1f",
        len(lengths),
        time.monotonic() - started,
    )
    return len(lengths)


def _lengths(longest: int) -> list[int]:
    """Of all buffers up to a model's longest context, the shortest first."""
    found = [buffer_length(1)]
    while found[-1] < longest:
        found.append(buffer_length(found[-1] + 1))
    return found


def _one_of_each_shape(cache: KVLayers) -> list[Any]:
    """Of the plain layers, the first with each number of heads and their sizes."""
    plain = [a for a in atoms(cache) if type(a) is KVCache and a.keys is not None]
    shapes = [(a.keys.shape[1], a.keys.shape[-1], a.values.shape[-1]) for a in plain]
    return [plain[shapes.index(shape)] for shape in dict.fromkeys(shapes)]


def _token_bytes(layer: Any) -> int:
    return sum(int(a.nbytes) // a.shape[2] for a in (layer.keys, layer.values))


def _lengthen(layer: Any, length: int) -> None:
    """Give a layer an empty buffer of that length, full but for one token."""
    for name in ("keys", "values"):
        shape = list(getattr(layer, name).shape)
        shape[2] = length
        setattr(layer, name, mx.zeros(shape, getattr(layer, name).dtype))
    layer.offset = length - 1
