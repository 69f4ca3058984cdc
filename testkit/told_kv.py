"""
KV that tells what it was computed from.

Each number is a digest of the ids up to its token, so that a wrong cut, a foreign
path or a checkpoint of another branch shows, at no model's cost. The caches are
mlx-lm's own, as a real model makes them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache, RotatingKVCache

from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import KVLayers, Leaves

HEADS, WIDTH = 2, 8
_QUANTISED_WIDTH = 64


def digests(ids: Sequence[int]) -> np.ndarray:
    """One number per beginning of `ids`, exact in fp32, never 0."""
    steps = accumulate(ids, lambda h, i: (h * 31337 + i + 1) % 0x3FFFFF, initial=7)
    return np.array(list(steps)[1:], dtype=np.float32) + 1


def tell(cache: KVLayers, ids: Sequence[int], start: int, end: int) -> None:
    """Advance a cache that holds `ids[:start]` to `ids[:end]`."""
    if start == end:
        return
    told = digests(ids[:end])
    for number, atom in enumerate(kv_layers.atoms(cache)):
        if isinstance(atom, ArraysCache):
            last = float(told[-1])
            atom.cache = [mx.full((1, 3), last), mx.full((1, 2, 2), last + number)]
        else:
            keys = _rows(told[start:end], _width(atom))
            atom.update_and_fetch(keys, keys + number + 1)
    kv_layers.evaluate(cache)


def _width(atom: Any) -> int:
    return _QUANTISED_WIDTH if isinstance(atom, QuantizedKVCache) else WIDTH


def _rows(told: np.ndarray, width: int) -> mx.array:
    shape = (1, HEADS, len(told), width)
    return mx.array(np.broadcast_to(told[None, None, :, None], shape))


def faults(cache: KVLayers, ids: Sequence[int]) -> list[str]:
    """What in a cache is not the KV of exactly `ids`."""
    told = digests(ids)
    found = []
    for number, atom in enumerate(kv_layers.atoms(cache)):
        if isinstance(atom, ArraysCache):
            states = [np.array(a).reshape(-1) for a in atom.cache if a is not None]
            wanted = [told[-1], told[-1] + number] if len(ids) else []
            right = len(states) == len(wanted) and all(
                (s == w).all() for s, w in zip(states, wanted, strict=True)
            )
        elif atom.offset != len(ids):
            found.append(f"atom {number} holds {atom.offset} tokens, not {len(ids)}")
            continue
        elif not len(ids):
            continue
        elif isinstance(atom, RotatingKVCache):
            right = _ends_with(atom, told, number)
        else:
            arrays = kv_layers.view(kv_layers.leaves(atom), 0, len(ids))
            right = not leaf_faults(atom, arrays, told, number)
        if not right:
            found.append(f"atom {number} does not hold the ids")
    return found


def _ends_with(atom: Any, told: np.ndarray, number: int) -> bool:
    keys = np.array(atom._temporal_order(atom.keys))[0, 0, :, 0]
    values = np.array(atom._temporal_order(atom.values))[0, 0, :, 0]
    count = min(len(told), atom.max_size)
    wanted = told[len(told) - count :]
    return bool(
        (keys[len(keys) - count :] == wanted).all()
        and (values[len(values) - count :] == wanted + number + 1).all()
    )


def leaf_faults(atom: Any, arrays: Leaves, told: np.ndarray, number: int) -> list[str]:
    """What in a stretch of a sliceable atom's arrays is not `told`."""
    if isinstance(atom, QuantizedKVCache):
        half = len(arrays) // 2
        arrays = [
            mx.dequantize(*part, group_size=atom.group_size, bits=atom.bits)
            for part in (arrays[:half], arrays[half:])
        ]
    keys, values = (np.array(a) for a in arrays)
    if keys.shape[2] != len(told):
        return [f"atom {number}: {keys.shape[2]} rows for {len(told)} ids"]
    wanted = told[None, None, :, None]
    exact = np.abs(keys - wanted).max(initial=0) < 0.01
    exact &= np.abs(values - wanted - number - 1).max(initial=0) < 0.01
    return [] if exact else [f"atom {number}: rows of other ids"]
