"""
Room in KV buffers, made before the step that needs it and layer by layer.

mlx-lm's layers grow within a step, by 256 tokens. On CUDA that step has a graph that no
other has, which is made anew: 80 to 110 ms on an H100, 850 once, where a step takes 12.
A buffer that grows in a graph of its own has that of the layer before it.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from sidecar.kv.kv_layers import KVLayers, atoms, join

_STEP = 256  # tokens, as in mlx-lm


def make_room(cache: KVLayers, num_tokens: int, step: int = _STEP) -> None:
    """
    Let the plain layers hold so many tokens more without growing.

    Args:
        step: a multiple of 256; each buffer is as long as the next multiple of it, or
            longer.
    """
    for atom in atoms(cache):
        if type(atom) not in (KVCache, BatchKVCache) or atom.keys is None:
            continue
        length = -(-(_depth(atom) + num_tokens) // step) * step
        missing = length - atom.keys.shape[2]
        if missing <= 0:
            return  # all are equally deep
        atom.keys, atom.values = join([[atom.keys, atom.values]], missing)
        mx.async_eval(atom.keys, atom.values)  # type: ignore[no-untyped-call]


def _depth(atom: Any) -> int:
    depth: int = atom._idx if type(atom) is BatchKVCache else atom.offset
    return depth
