"""How far two computations of one model are apart, relative to their own spread."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import KVLayers

# A unit in the last place where that is coarse; else of sums of many products.
_ROUNDING = {mx.float32: 1e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}


_MAX_NOISE = 1000  # times what the number format rounds
_NOISE_FACTOR = 3.0  # of two computations that differ in all shapes, not in one


def rounding_of(array: mx.array) -> float:
    """The distance that its number format alone may make."""
    return _ROUNDING.get(array.dtype, 1e-5)


def logits_distance(one: Sequence[mx.array], other: Sequence[mx.array]) -> float:
    """The distance of two sequences' logits; infinite if one has fewer."""
    if len(one) != len(other):
        return math.inf
    return _distance(mx.concatenate(list(one)), mx.concatenate(list(other)))


def kv_distance(
    one: KVLayers, other: KVLayers, start: int, end: int | None = None
) -> float:
    """
    The largest distance of two caches in layers with a row per token, at [start, end).

    Args:
        end: None for all that both hold; infinite if that is not as much.
    """
    depth = kv_layers.depth(one)
    if end is None and depth != kv_layers.depth(other):
        return math.inf
    stop = depth if end is None else end
    pairs = zip(kv_layers.atoms(one), kv_layers.atoms(other), strict=True)
    return max(
        (
            _distance(a[..., start:stop, :], b[..., start:stop, :])
            for mine, theirs in pairs
            if kv_layers.is_sliceable_atom(mine)
            for a, b in zip(
                kv_layers.leaves(mine), kv_layers.leaves(theirs), strict=True
            )
        ),
        default=0.0,
    )


def states_distance(one: KVLayers, other: KVLayers) -> float:
    """The largest distance of two caches' layers that exist at one depth only."""
    pairs = zip(kv_layers.atoms(one), kv_layers.atoms(other), strict=True)
    return max(
        (
            _state_distance(mine.state, theirs.state)
            for mine, theirs in pairs
            if not kv_layers.is_sliceable_atom(mine)
        ),
        default=0.0,
    )


def _state_distance(mine: Any, theirs: Any) -> float:
    if type(mine) is not type(theirs):
        return math.inf
    if isinstance(mine, mx.array):
        return _distance(mine, theirs)
    if isinstance(mine, (list, tuple)):
        pairs = zip(mine, theirs, strict=True)
        return max((_state_distance(a, b) for a, b in pairs), default=0.0)
    return 0.0 if mine == theirs else math.inf


def _distance(a: mx.array, b: mx.array) -> float:
    """The root mean square of the difference over that of the first; NaN is far."""
    if a.shape != b.shape:
        return math.inf
    if not a.size:
        return 0.0
    one, other = a.astype(mx.float32), b.astype(mx.float32)
    differ: Any = mx.mean(mx.square(one - other)).item()
    spread: Any = mx.mean(mx.square(one)).item()
    if not math.isfinite(differ):
        return math.inf
    return math.sqrt(differ / spread) if spread else math.sqrt(differ)


@dataclass(frozen=True, slots=True)
class Difference:
    """
    How far a way of reuse is from a computation without it.

    All relative to the spread of what is compared: models differ in scale.

    Args:
        moved: of KV that was only moved: nothing but 0 will do.
        computed: of what was computed from it.
        noise: of two honest computations; None if it was not needed.
        rounding: of the model's number format, which is always allowed.
    """

    moved: float
    computed: float
    rounding: float
    noise: float | None = None

    @property
    def limit(self) -> float:
        """What `computed` may be; noise far beyond rounding is none."""
        noise = min(self.noise or 0.0, _MAX_NOISE * self.rounding)
        return _NOISE_FACTOR * noise + self.rounding

    @property
    def is_allowed(self) -> bool:
        """Whether it is rounding and nothing else."""
        is_near = math.isfinite(self.computed) and self.computed <= self.limit
        return self.moved == 0.0 and is_near

    def __str__(self) -> str:
        noise = "-" if self.noise is None else f"{self.noise:.1e}"
        return (
            f"moved={self.moved:.1e} computed={self.computed:.1e} "
            f"allowed={self.limit:.1e} noise={noise}"
        )
