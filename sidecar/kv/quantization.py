"""
KV in fewer bits (KV_BITS): from a depth on, live and stored.

mx.quantize works on groups within one token's row, so cutting and joining commute
with it: a path may be stored partly plain, partly quantised, and is made quantised
as a whole when it is put together. A chunk of a prompt ends at that depth, so that
each token attends to the same KV however much of its prompt was reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from sidecar.kv.kv_layers import KVLayers, Leaves, is_quantized


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """
    How KV is quantised.

    Args:
        bits: 4 or 8. group_size: values that share a scale; divides the head's width.
        start: tokens from which a sequence's KV is quantised, all of it.
    """

    bits: int
    group_size: int
    start: int

    def apply(self, cache: KVLayers) -> None:
        """Quantise the layers of a live cache that have reached the start, in place."""
        maybe_quantize_kv_cache(cache, self.start, self.group_size, self.bits)

    def fresh(self, cache: KVLayers, arrays: Sequence[Leaves]) -> None:
        """Prepare an empty cache to be given those arrays."""
        if any(is_quantized(leaves) for leaves in arrays):
            maybe_quantize_kv_cache(cache, 0, self.group_size, self.bits)

    def unify(self, runs: Sequence[list[Leaves]]) -> list[list[Leaves]]:
        """Make a layer's runs all of one kind: quantised, as soon as one of them is."""
        kinds = [any(map(is_quantized, runs_of)) for runs_of in zip(*runs, strict=True)]
        return [
            [
                self._quantized(leaves) if is_needed else leaves
                for leaves, is_needed in zip(run, kinds, strict=True)
            ]
            for run in runs
        ]

    def _quantized(self, leaves: Leaves) -> Leaves:
        if is_quantized(leaves):
            return leaves
        return [
            part
            for array in leaves
            for part in mx.quantize(
                mx.contiguous(array), group_size=self.group_size, bits=self.bits
            )
        ]
