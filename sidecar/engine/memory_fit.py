"""
Measures on a loaded model what the model of its memory holds (memory_model).

A chunk is computed at a small depth and, behind KV that is only zeros, at a large one.
What the second takes more is what depth costs: nothing where attention is fused. Two
small depths do not tell that apart from the device's workspace: on an H100 they said
3 kB for each two tokens where it is none, and a prompt of 131,072 tokens was refused.
"""

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.memory_model import SEGMENT, MemoryModel
from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import KVLayers, release_freed_memory
from sidecar.kv.quantization import KVQuantization

logger = logging.getLogger(__name__)

_LARGE_DEPTH_BYTES = 512 << 20  # of KV, where that is less than a large depth
_NEAR = 256  # tokens by which most KV grows at a time
# MLX lets ten command buffers be in flight, so that a few layers grow at a time: on an
# H100 750 of 4,870 MB were held twice, which are 5.5 of 36 layers.
_LAYERS_GROWING = 8
Fitted = tuple[MemoryModel, float]


@dataclass(frozen=True, slots=True)
class _Lengths:
    """
    In tokens: of two chunks, one behind the other, and how deep a third one lies.

    Args:
        depth_recurrent: of a model with recurrent layers, whose chunks are longer.
    """

    first: int
    chunk: int
    depth: int
    depth_recurrent: int


_ON_GPU = _Lengths(48, 96, 4096, 4096)
# A load waits for them, and a CPU is slow. Nothing is fused there, so that these show
# what longer ones do: 13.2 and 13.5 kB a token, 9.0 and 9.1 bytes a pair. Half as long
# they say the same on an idle machine, and too little beside others (gpt_oss: 1.07 of
# what is foreseen was taken).
_ON_CPU = _Lengths(32, 64, 512, 2048)


@dataclass(frozen=True, slots=True)
class _Computed:
    """
    A chunk that was computed, to a depth.

    Args:
        cost: most bytes that it took at a time, beyond the KV that stays.
    """

    num_tokens: int
    depth: int
    cost: int
    seconds: float

    @property
    def num_pairs(self) -> int:
        """Each of its tokens with each that it attends to."""
        return self.num_tokens * self.depth


class _Prober:
    """Computes chunks of one sequence. GPU thread only."""

    def __init__(self, model: LoadedModel, quantization: KVQuantization | None) -> None:
        self.cache = model.new_cache()
        self._model = model
        self._quantization = quantization
        self._depth = 0

    def compute(self, num_tokens: int) -> _Computed:
        """Compute a chunk behind those before."""
        token = min(self._model.stop_ids, default=0)
        held = sum(layer.nbytes for layer in self.cache)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        started = time.perf_counter()
        self._model.forward(mx.array([[token] * num_tokens]), self.cache)
        if self._quantization:
            self._quantization.apply(self.cache)
        kv_layers.evaluate(self.cache)
        seconds = time.perf_counter() - started
        self._depth += num_tokens
        stays = sum(layer.nbytes for layer in self.cache) - held
        cost = max(0, mx.get_peak_memory() - before - max(0, stays))
        return _Computed(num_tokens, self._depth, cost, seconds)

    def deepen(self, depth: int) -> None:
        """Go on behind so many tokens, whose KV is zeros; no buffer needs to grow."""
        for atom in kv_layers.atoms(self.cache):
            if kv_layers.is_sliceable_atom(atom) and (held := kv_layers.leaves(atom)):
                kv_layers.set_leaves(atom, kv_layers.join([held], depth), depth)
        kv_layers.evaluate(self.cache)
        self._depth = depth


def fit_memory(model: LoadedModel, step_size: int) -> Generator[None, None, Fitted]:
    """
    Measure a few chunks of the loaded model; a turn of the GPU thread each.

    Args:
        step_size: of a prefill chunk; KV is quantised at a chunk's end.
    Returns:
        What prefill takes, and the seconds that a token took.
    """
    fitted, rate_s = yield from _fit(model, None, step_size)
    if model.quantization is None:
        return fitted, rate_s
    start = replace(model.quantization, start=0)
    quantized, rate_s = yield from _fit(model, start, step_size)
    both = replace(
        quantized,
        per_token=max(fitted.per_token, quantized.per_token),
        plain_per_token=fitted.kv_per_token,
        plain_until=model.quantization.start + step_size,
    )
    return both, rate_s


def _fit(
    model: LoadedModel, quantization: KVQuantization | None, step_size: int
) -> Generator[None, None, Fitted]:
    lengths = _ON_CPU if mx.default_device() == mx.cpu else _ON_GPU
    prober = _Prober(model, quantization)
    first = prober.compute(lengths.first)
    yield
    windows = [_window(atom) for atom in kv_layers.atoms(prober.cache)]
    is_recurrent = None in windows
    length = SEGMENT if is_recurrent else lengths.chunk
    near, chunk = _computed_twice(prober, length, is_recurrent=is_recurrent)
    yield
    if quantization is None and is_recurrent:  # what else there is may grow
        growing, fixed = lazy_kv_sizes(model.new_cache, model.forward)
    else:
        growing, fixed = kv_sizes(prober.cache)
    buffers = len(kv_layers.arrays_of(prober.cache))
    deep = None
    depth = lengths.depth_recurrent if is_recurrent else lengths.depth
    if growing and _deepen(model, prober, min(depth, _LARGE_DEPTH_BYTES // growing)):
        _, deep = _computed_twice(prober, length, is_recurrent=is_recurrent)
    per_pair = _slope(near, deep) if deep else _slope(first, chunk)
    per_token = max(first.cost / first.num_tokens, chunk.cost / chunk.num_tokens)
    per_square = _excess(first, chunk) if is_recurrent else 0.0
    if not growing:  # a chunk's tokens meet the window and each other, and no more
        window = max(size or 0 for size in windows)
        per_token += per_pair * (window + step_size if window else 0)
        per_pair = 0.0
    share = min(1.0, _LAYERS_GROWING / max(1, windows.count(0)))
    del prober
    release_freed_memory()
    fitted = MemoryModel(
        growing,
        per_token,
        per_pair,
        fixed,
        buffers=buffers,
        growing_share=share,
        per_square=per_square,
    )
    return fitted, chunk.seconds / chunk.num_tokens


def _computed_twice(
    prober: _Prober, num_tokens: int, *, is_recurrent: bool
) -> tuple[_Computed, _Computed]:
    """
    The cheaper and the dearer of two chunks; of a model without recurrent layers one.

    Recurrent layers take as many tokens at a time as these have. What that takes hangs
    on how far the device is behind the host: on a busy CPU a shorter chunk showed less
    than half of what a whole one took, and one of two less than the other.
    """
    if not is_recurrent:
        return (computed := prober.compute(num_tokens)), computed
    found = [prober.compute(num_tokens) for _ in range(2)]
    low, high = sorted(found, key=lambda computed: computed.cost)
    return low, high


def _deepen(model: LoadedModel, prober: _Prober, depth: int) -> bool:
    """Go far behind the first chunks; False: the layers are to be equally deep."""
    try:
        prober.deepen(depth)
        prober.compute(1)
    except (ValueError, TypeError) as error:
        logger.info("depth not tried in fitting memory model=%s: %s", model.name, error)
        return False
    return True


def _slope(near: _Computed, far: _Computed) -> float:
    """Bytes that each token takes with each that it attends to."""
    return _beyond(near, far) / (far.num_pairs - near.num_pairs)


def _excess(small: _Computed, large: _Computed) -> float:
    """Bytes that each pair of tokens of a chunk takes, where all of them meet."""
    return (
        _beyond(small, large) / large.num_tokens / (large.num_tokens - small.num_tokens)
    )


def _beyond(one: _Computed, other: _Computed) -> float:
    """Bytes that another chunk takes beyond what its number of tokens says."""
    return max(0.0, other.cost - one.cost * other.num_tokens / one.num_tokens)


def _window(atom: Any) -> int | None:
    """Tokens that a layer keeps; 0: every one; None: it is recurrent."""
    if kv_layers.is_sliceable_atom(atom):
        return 0
    if chunk_size := getattr(atom, "chunk_size", None):  # and its buffer's last step
        return int(chunk_size) + _NEAR
    size: int | None = getattr(atom, "max_size", None)
    return size


def kv_sizes(cache: KVLayers, later: KVLayers | None = None) -> tuple[int, int]:
    """
    Bytes of KV that each token adds, and bytes of the layers that do not grow.

    Args:
        later: the same at a depth of 512 tokens, and `cache` at 256: what is neither
            cut nor a window may grow as well (compressed groups of tokens). None: it
            is taken not to.
    """
    per_token = fixed = 0
    further = kv_layers.atoms(cache if later is None else later)
    for atom, other in zip(kv_layers.atoms(cache), further, strict=True):
        if kv_layers.is_sliceable_atom(atom):
            per_token += kv_layers.token_nbytes([atom])
        elif window := _window(atom):
            fixed += window * kv_layers.token_nbytes([atom])
        else:
            grown = max(0, other.nbytes - atom.nbytes)
            per_token += -(-grown // _NEAR)
            fixed += atom.nbytes
    return per_token, fixed


def lazy_kv_sizes(
    new_cache: Callable[[], KVLayers], forward: Callable[..., Any]
) -> tuple[int, int]:
    """
    `kv_sizes` of a model, of which nothing is computed.

    MLX is lazy, and knows the shapes of KV before.
    """
    found = []
    for depth in (_NEAR, 2 * _NEAR):
        cache = new_cache()
        forward(mx.zeros((1, depth), mx.int32), cache=cache)
        found.append(cache)
    return kv_sizes(*found)
