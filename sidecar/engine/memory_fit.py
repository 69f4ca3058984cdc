"""Measures on a loaded model what the model of its memory holds (memory_model)."""

import time
from collections.abc import Generator
from dataclasses import replace

import mlx.core as mx
import numpy as np

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.memory_model import MemoryModel
from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import KVLayers, release_freed_memory
from sidecar.kv.quantization import KVQuantization

_PROBES = (48, 96)  # chunks, one behind the other: a load waits for them
Fitted = tuple[MemoryModel, float]


def fit_memory(model: LoadedModel, step_size: int) -> Generator[None, None, Fitted]:
    """
    Measure a few chunks of the loaded model; a turn of the GPU thread each.

    Args:
        step_size: of a prefill chunk; KV is quantised at a chunk's end.
    Returns:
        What prefill takes, and the seconds a token of the last chunk took.
    """
    fitted, rate_s = yield from _fit(model, None)
    if model.quantization is None:
        return fitted, rate_s
    start = replace(model.quantization, start=0)
    quantized, rate_s = yield from _fit(model, start)
    both = replace(
        quantized,
        per_token=max(fitted.per_token, quantized.per_token),
        plain_per_token=fitted.kv_per_token,
        plain_until=model.quantization.start + step_size,
    )
    return both, rate_s


def _fit(
    model: LoadedModel, quantization: KVQuantization | None
) -> Generator[None, None, Fitted]:
    cache = model.new_cache()
    rows, costs = [], []
    token = min(model.stop_ids, default=0)
    depth, rate_s = 0, 0.0
    for chunk in _PROBES:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        started = time.perf_counter()
        model.forward(mx.array([[token] * chunk]), cache)
        if quantization:
            quantization.apply(cache)
        kv_layers.evaluate(cache)
        rate_s = (time.perf_counter() - started) / chunk
        depth += chunk
        held = sum(layer.nbytes for layer in cache)
        rows.append([chunk, chunk * depth])
        costs.append(mx.get_peak_memory() - before - 2 * held)
        yield
    solution = np.linalg.lstsq(
        np.array(rows, float), np.array(costs, float), rcond=None
    )
    per_token, per_pair = (max(0.0, float(value)) for value in solution[0])
    release_freed_memory()
    growing, fixed = kv_sizes(cache)
    buffers = len(kv_layers.arrays_of(cache))
    return MemoryModel(growing, per_token, per_pair, fixed, buffers=buffers), rate_s


def kv_sizes(cache: KVLayers) -> tuple[int, int]:
    """Bytes of KV that each token adds, and bytes of the layers that do not grow."""
    per_token = fixed = 0
    for atom in kv_layers.atoms(cache):
        if kv_layers.is_sliceable_atom(atom):
            per_token += kv_layers.token_nbytes([atom])
        elif window := getattr(atom, "max_size", None):
            fixed += window * kv_layers.token_nbytes([atom])
        else:
            fixed += atom.nbytes
    return per_token, fixed
