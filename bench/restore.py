"""
Restoring KV against one memory copy of it.

    python -m bench.restore

Times what happens between admission and the first forward pass of a request whose
whole prompt but its last token is stored, with no other request running: the restore,
joining the decode batch, and room for the first token. Where the path lies in several
buffers it is copied once, which may take at most 1.5 times as long as a bare copy of
as many bytes; else it is lent, and nothing may be copied. Both copies go into fresh
memory, as in a server that gives back what it does not use: arrays above 32 MB, which
glibc always maps anew. Runs are interleaved and medians taken. The caches are a real
model's, filled with random numbers: no forward pass is needed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from sidecar.cache import kv_layers
from sidecar.cache.eviction import Limits
from sidecar.cache.kv_layers import KVLayers
from sidecar.cache.node import Owner
from sidecar.cache.store import PrefixStore
from sidecar.core.prompt import ModelIds

MOST_COPIES = 1.5
_SMALL = 4096  # counters and the like, far below any KV
_HEADS, _HEAD_DIM = 8, 128


@dataclass
class Times:
    """Seconds of each run."""

    bare_copy: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    lent: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """
    Medians, and what the lend path allocated.

    Args:
        num_bytes: of the KV. lent_bytes: new memory at the end of the lend path.
    """

    num_bytes: int
    bare_copy_s: float
    copied_s: float
    lent_s: float
    lent_bytes: int
    same_arrays: bool

    @property
    def copies(self) -> float:
        """The copy path in bare copies."""
        return self.copied_s / self.bare_copy_s

    @property
    def is_good(self) -> bool:
        """Whether both bars hold."""
        lends = self.same_arrays and self.lent_bytes < _SMALL
        return self.copies <= MOST_COPIES and lends


class Bench:
    """
    A store on a model's caches.

    Args:
        tokens: of KV, an even number.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        self._model = _model(layers)
        self._tokens = tokens
        self._own = ModelIds(tuple(range(tokens)))

    def run(self, rounds: int) -> Result:
        """All three, interleaved."""
        times, worst, same = Times(), 0, True
        source = self._filled(self._tokens)
        num_bytes = self._tokens * _token_bytes(source)
        for _ in range(rounds):
            times.bare_copy.append(self._bare_copy(source))
            times.copied.append(self._restore(self._in_two_buffers())[0])
            seconds, grown, is_same = self._restore(self._in_one_buffer())
            times.lent.append(seconds)
            worst, same = max(worst, grown), same and is_same
        median = statistics.median
        return Result(
            num_bytes, median(times.bare_copy), median(times.copied),
            median(times.lent), worst, same,
        )  # fmt: skip

    def _bare_copy(self, cache: KVLayers) -> float:
        arrays = [
            a[..., : self._tokens, :]
            for leaves in kv_layers.sliceable_leaves(cache)
            for a in leaves
        ]
        mx.clear_cache()
        started = time.perf_counter()
        copies = [a + 0 for a in arrays]
        mx.eval(copies)
        return time.perf_counter() - started

    def _restore(self, store: PrefixStore) -> tuple[float, int, bool]:
        """Seconds, new bytes, and whether the stored arrays themselves were given."""
        stored = {
            id(a)
            for node in store._tree.nodes()
            if node.buffer
            for leaves in node.buffer.arrays
            for a in leaves
        }
        mx.clear_cache()
        before = mx.get_active_memory()
        started = time.perf_counter()
        restored = store.restore(ModelIds((*self._own, 1)))
        kv_layers.evaluate(restored.cache)
        given = {
            id(a) for run in kv_layers.sliceable_leaves(restored.cache) for a in run
        }
        batch = kv_layers.to_batch(restored.cache)
        _append(batch, 1)
        seconds = time.perf_counter() - started
        assert restored.cached_len == self._tokens
        grown = mx.get_active_memory() - before
        store.abandon(restored.lease)
        return seconds, grown, given <= stored

    def _in_one_buffer(self) -> PrefixStore:
        store = self._store()
        self._keep(store, self._own)
        return store

    def _in_two_buffers(self) -> PrefixStore:
        """Half of it belongs to a longer conversation that was there before."""
        store = self._store()
        half = self._tokens // 2
        other = tuple(range(10**6, 10**6 + half + 1))
        self._keep(store, ModelIds((*self._own[:half], *other)))
        self._keep(store, self._own)
        return store

    def _store(self) -> PrefixStore:
        limits = Limits(1 << 50, max_leaves=100)
        return PrefixStore(limits, lambda: make_prompt_cache(self._model))

    def _keep(self, store: PrefixStore, ids: ModelIds) -> None:
        lease = store.restore(ids).lease
        store.give_back(lease, ids, self._filled(len(ids)), Owner(), {})

    def _filled(self, tokens: int) -> KVLayers:
        cache: KVLayers = make_prompt_cache(self._model)
        _append(cache, tokens + 64)  # room, as decoding leaves it
        for layer in cache:
            layer.offset = tokens
        return cache


def _append(cache: KVLayers, tokens: int) -> None:
    shape = (1, _HEADS, tokens, _HEAD_DIM)
    for layer in cache:
        layer.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
    mx.eval([layer.state for layer in cache])


def _token_bytes(cache: KVLayers) -> int:
    leaves = [a for run in kv_layers.sliceable_leaves(cache) for a in run]
    return sum(a.nbytes // a.shape[-2] for a in leaves)


def _model(layers: int) -> Any:
    return qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=32,
            num_hidden_layers=layers,
            intermediate_size=32,
            num_attention_heads=_HEADS,
            num_key_value_heads=_HEADS,
            head_dim=_HEAD_DIM,
            rms_norm_eps=1e-6,
            vocab_size=32,
            max_position_embeddings=1 << 18,
            rope_theta=1e6,
            tie_word_embeddings=True,
        )
    )


def main(argv: Sequence[str] | None = None, show: Callable[..., None] = print) -> int:
    """Run and report; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.restore")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8448)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    result = Bench(options.layers, options.tokens).run(options.rounds)
    show(f"KV                     {result.num_bytes / 1e6:8.0f} MB")
    show(f"one copy of it         {result.bare_copy_s * 1e3:8.1f} ms")
    show(
        f"restored by copying    {result.copied_s * 1e3:8.1f} ms, "
        f"{result.copies:.2f} copies (at most {MOST_COPIES})"
    )
    show(
        f"restored by lending    {result.lent_s * 1e3:8.1f} ms, "
        f"{result.lent_bytes} new bytes, "
        f"{'the same' if result.same_arrays else 'other'} arrays"
    )
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
