"""
How much memory a prompt needs, and what is done when the process has too little.

What a prefill chunk costs is fitted on the loaded model: a share per token of the
chunk, and one per token and depth (attention that is not fused, buffers that grow by
copying). From that the largest context that fits now follows, before anything is
allocated.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from sidecar.engine.job import NOTHING, Demand
from sidecar.engine.loader import LoadedModel
from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import KVLayers
from sidecar.kv.quantization import KVQuantization

logger = logging.getLogger(__name__)

_PROBES = (32, 64, 128, 192)  # chunks, one behind the other
_SMALLEST_CHUNK = 64
_ROOM_STEP = 256  # tokens by which KV buffers grow
_SAFETY = 1.1
_SAMPLE_EVERY_S = 1.0
_CLEAR_AT, _FULL_AT, _EVICT_TO = 0.90, 1.0, 0.80


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """
    Bytes a sequence holds, and a prefill takes beyond that.

    Args:
        kv_per_token: KV of one token, all layers that keep every token.
        per_token, per_pair: cost of a chunk's token, and of a token at a depth.
        fixed: state that does not grow: recurrent layers, full windows.
        plain_per_token, plain_until: the same while not yet quantised (KV_BITS).
    """

    kv_per_token: float
    per_token: float
    per_pair: float
    fixed: int = 0
    plain_per_token: float = 0.0
    plain_until: int = 0

    def kv_bytes(self, depth: int) -> int:
        """Most that a sequence of `depth` tokens has held on its way."""
        plain = self.plain_per_token * min(depth, self.plain_until)
        return self.fixed + int(max(self.kv_per_token * depth, plain))

    def peak_bytes(self, depth: int, chunk_len: int) -> int:
        """Highest use, beyond what is held, of a chunk that ends at `depth`."""
        own = self.per_token * chunk_len + self.per_pair * chunk_len * depth
        growth = self.kv_bytes(depth)  # the old buffer lives beside the new one
        return int(_SAFETY * (own + growth + self.kv_per_token * chunk_len))

    def demand(self, length: int, num_copies: int = 1) -> Demand:
        """
        What a prompt takes with small chunks, until its first token.

        Args:
            num_copies: answers that decode side by side, each with KV of its own.
        """
        held = num_copies * self.kv_bytes(length + _ROOM_STEP)
        return Demand(held, self.peak_bytes(length, _SMALLEST_CHUNK))

    def rest(self, length: int, num_copies: int, done: int) -> Demand:
        """What is left of a prompt's demand once `done` tokens of it are held."""
        whole = self.demand(length, num_copies)
        return Demand(max(0, whole.held - self.kv_bytes(done)), whole.peak)

    def largest_context(
        self, free_bytes: int, most: int, others: Demand = NOTHING, num_copies: int = 1
    ) -> int:
        """The longest prompt that fits into `free_bytes` beside what others need."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if (others + self.demand(middle, num_copies)).total <= free_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def fit_memory(model: LoadedModel, step_size: int) -> tuple[MemoryModel, float]:
    """
    Measure a few chunks of the loaded model; GPU thread only.

    Args:
        step_size: of a prefill chunk; KV is quantised at a chunk's end.
    Returns:
        What prefill takes, and the seconds a token of the last chunk took.
    """
    fitted, rate_s = _fit(model, None)
    if model.quantization is None:
        return fitted, rate_s
    quantized, rate_s = _fit(model, replace(model.quantization, start=0))
    both = replace(
        quantized,
        per_token=max(fitted.per_token, quantized.per_token),
        plain_per_token=fitted.kv_per_token,
        plain_until=model.quantization.start + step_size,
    )
    return both, rate_s


def _fit(
    model: LoadedModel, quantization: KVQuantization | None
) -> tuple[MemoryModel, float]:
    cache = model.new_cache()
    rows, costs = [], []
    token = min(model.stop_ids, default=0)
    depth, rate_s = 0, 0.0
    for chunk in _PROBES:
        mx.clear_cache()
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
    solution = np.linalg.lstsq(
        np.array(rows, float), np.array(costs, float), rcond=None
    )
    per_token, per_pair = (max(0.0, float(value)) for value in solution[0])
    mx.clear_cache()
    growing, fixed = kv_sizes(cache)
    return MemoryModel(growing, per_token, per_pair, fixed), rate_s


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


class Evictable(Protocol):
    """Keeps KV that can be let go."""

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""

    def evict_bytes(self, num_bytes: int) -> None:
        """Free at least that much, if it is there; GPU thread only."""


class MemoryGuard:
    """
    Watches the process against its limit.

    `sample` and `relieve` on the GPU thread; the numbers may be read from any. They are
    of one moment: KV that was given back since would count as free and as not in use.

    Args:
        limit_bytes: MAX_PROCESS_MEMORY.
        store: where KV is kept that could be evicted.
    """

    def __init__(
        self,
        model: MemoryModel,
        limit_bytes: int,
        store: Evictable,
    ) -> None:
        self.model = model
        self.limit_bytes = limit_bytes
        self._store = store
        self._sampled_at = 0.0
        self.active_bytes = self.peak_bytes = self.free_bytes = 0
        self.sample()

    def sample(self) -> None:
        """Note what is in use now."""
        self._sampled_at = time.monotonic()
        self.active_bytes = mx.get_active_memory()
        self.peak_bytes = mx.get_peak_memory()
        stored = self._store.num_bytes  # would make room
        self.free_bytes = max(0, self.limit_bytes - self.active_bytes + stored)

    def largest_context(
        self, most: int, others: Demand = NOTHING, num_copies: int = 1
    ) -> int:
        """The longest prompt that fits now, at most `most` tokens."""
        return self.model.largest_context(self.free_bytes, most, others, num_copies)

    def refusal(
        self, length: int, num_copies: int, most: int, others: Demand = NOTHING
    ) -> str:
        """Say of a prompt that does not fit what it needs, and what would."""
        needed = self.model.demand(length, num_copies).total
        left = max(0, self.free_bytes - others.held)
        largest = self.largest_context(most, others, num_copies)
        return (
            f"a prompt of {length} tokens needs {needed >> 20} MiB, and {left >> 20} "
            f"MiB of {self.limit_bytes >> 20} MiB are left: the largest context that "
            f"fits now is {largest} tokens"
        )

    def fitting_chunk(self, depth: int, chunk_len: int) -> int:
        """A chunk that stays below the limit at this depth, at least 64 tokens."""
        room = self.limit_bytes - mx.get_active_memory()
        while chunk_len > _SMALLEST_CHUNK:
            if self.model.peak_bytes(depth + chunk_len, chunk_len) <= room:
                break
            chunk_len = max(_SMALLEST_CHUNK, chunk_len // 2)
        return chunk_len

    def relieve(self, needed_bytes: int = 0) -> bool:
        """
        Make room in order: the allocator's cache, then stored KV.

        Args:
            needed_bytes: about to be allocated.
        Returns:
            Whether it all fits now.
        """
        now = time.monotonic()
        if not needed_bytes and now - self._sampled_at < _SAMPLE_EVERY_S:
            return True
        self.sample()
        used = self.active_bytes + mx.get_cache_memory() + needed_bytes
        if used > _CLEAR_AT * self.limit_bytes:
            mx.clear_cache()
            used = self.active_bytes + needed_bytes
        if used > _CLEAR_AT * self.limit_bytes:
            self._store.evict_bytes(used - int(_EVICT_TO * self.limit_bytes))
            mx.clear_cache()
            self.sample()
            logger.info("made room limit=%d active=%d", self.limit_bytes,
                        self.active_bytes)  # fmt: skip
        return self.active_bytes + needed_bytes <= _FULL_AT * self.limit_bytes
