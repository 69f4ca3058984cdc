"""
Warm equals cold, proved on the user's machine at load (cache.md s10).

Each way in which the store hands out KV is run against a fresh prefill of the same
ids: greedy tokens and logits are compared. A way that fails is switched off.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from sidecar.cache import kv_layers
from sidecar.cache.eviction import Limits
from sidecar.cache.kv_layers import KVLayers
from sidecar.cache.node import Owner
from sidecar.cache.store import PrefixStore
from sidecar.core.prompt import ModelIds
from sidecar.engine.loader import LoadedModel

logger = logging.getLogger(__name__)

_PROMPT_LEN = 64
_NUM_TOKENS = 8
_DEADLINE_S = 20.0
# Rounding differs with the shape of a batch; a wrong KV is off by whole units.
_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class PathResult:
    """One way of reuse: `ok`, `failed` or `skipped`, and the largest difference."""

    name: str
    outcome: str
    max_delta: float


def run_selftest(model: LoadedModel) -> list[PathResult]:
    """Try every path; GPU thread only."""
    started = time.monotonic()
    test = _SelfTest(model)
    results = []
    for name, path in test.paths():
        if time.monotonic() - started > _DEADLINE_S:
            results.append(PathResult(name, "skipped", 0.0))
            continue
        try:
            delta = path()
        except Exception:
            logger.exception("selftest path failed name=%s", name)
            delta = float("inf")
        outcome = "ok" if delta <= _TOLERANCE else "failed"
        results.append(PathResult(name, outcome, delta))
    mx.clear_cache()
    return results


class _SelfTest:
    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        asked = model.quantization
        self._quantization = replace(asked, start=0) if asked else None
        size = model.vocab_size
        self._ids = ModelIds(tuple((7 * i + 3) % min(size, 997) for i in range(160)))
        self._owner = Owner()

    def paths(self) -> list[tuple[str, Callable[[], float]]]:
        paths = [
            ("restore", lambda: self._warm(_PROMPT_LEN, 96)),
            ("lend", lambda: self._warm(_PROMPT_LEN, 96, lend=True)),
            ("trim", lambda: self._warm(96, 80, common=48)),
            ("branch", self._branch),
            ("checkpoint", lambda: self._warm(96, 120, common=_PROMPT_LEN)),
            ("batch", self._batch),
        ]
        return paths[:-1] if self._quantization else paths  # its rows run alone

    def _store(self) -> PrefixStore:
        limits, new_cache = Limits(1 << 40), self._model.new_cache
        return PrefixStore(limits, new_cache, self._quantization)

    def _settle(self, cache: KVLayers) -> None:
        """End a chunk as the engine does."""
        if self._quantization:
            self._quantization.apply(cache)
        kv_layers.evaluate(cache)

    def _advance(self, cache: KVLayers, ids: ModelIds, start: int) -> mx.array:
        """Compute ids[start:]; the logits of the last."""
        if start < len(ids) - 1:
            self._model.model(mx.array([ids[start:-1]]), cache=cache)
            self._settle(cache)
        logits: mx.array = self._model.model(mx.array([ids[-1:]]), cache=cache)
        return logits[:, -1]

    def _rows(self, cache: KVLayers, ids: ModelIds, start: int) -> list[mx.array]:
        """Logits of a greedy continuation."""
        logits = self._advance(cache, ids, start)
        rows = [logits]
        for _ in range(_NUM_TOKENS):
            token = mx.argmax(logits, axis=-1)
            logits = self._model.model(token[:, None], cache=cache)[:, -1]
            rows.append(logits)
        mx.eval(rows)
        return rows

    def _fill(self, store: PrefixStore, ids: ModelIds, stop: int) -> None:
        cache = self._model.new_cache()
        self._model.model(mx.array([ids[:stop]]), cache=cache)
        kv_layers.evaluate(cache)
        marks = {stop: (2, kv_layers.take_checkpoint(cache))}
        if stop < len(ids):
            self._model.model(mx.array([ids[stop:]]), cache=cache)
            kv_layers.evaluate(cache)
            marks[len(ids)] = (2, kv_layers.take_checkpoint(cache))
        self._settle(cache)
        restored = store.restore(ids)
        store.give_back(restored.lease, ids, cache, self._owner, marks)

    def _warm(
        self, stored: int, asked: int, common: int | None = None, *, lend: bool = False
    ) -> float:
        """Store a prompt, restore a second one that shares a beginning with it."""
        common = stored if common is None else common
        other = ModelIds(tuple(reversed(self._ids)))
        first = ModelIds((*self._ids[:common], *other[: stored - common]))
        second = ModelIds(self._ids[:asked])
        store = self._store()
        self._fill(store, first, common)
        if not lend:
            store.switch_off("lend")
        restored = store.restore(second)
        warm = self._rows(restored.cache, second, restored.cached_len)
        return self._compare(second, warm, restored.cached_len)

    def _branch(self) -> float:
        """Two prompts that part in the middle of a stored run, both served."""
        store = self._store()
        first = ModelIds(self._ids[:96])
        self._fill(store, first, _PROMPT_LEN)
        second = ModelIds((*self._ids[:_PROMPT_LEN], *self._ids[100:130]))
        self._fill(store, second, _PROMPT_LEN)
        deltas = []
        for ids in (first, second):
            longer = ModelIds((*ids, *self._ids[:5]))
            restored = store.restore(longer)
            warm = self._rows(restored.cache, longer, restored.cached_len)
            deltas.append(self._compare(longer, warm, restored.cached_len))
        return max(deltas)

    def _batch(self) -> float:
        """A row beside a shorter one gives what it gives alone."""
        lengths = (40, 90)
        caches = []
        for length in lengths:
            cache = self._model.new_cache()
            self._model.model(mx.array([self._ids[:length]]), cache=cache)
            kv_layers.evaluate(cache)
            caches.append(cache)
        merged = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
        last = mx.array([[self._ids[length]] for length in lengths])
        together = self._model.model(last, cache=merged)[:, -1]
        deltas = []
        for row, length in enumerate(lengths):
            ids = ModelIds(self._ids[: length + 1])
            alone = self._advance(self._model.new_cache(), ids, 0)
            deltas.append(_delta(alone[0], together[row]))
        return max(deltas)

    def _compare(self, ids: ModelIds, warm: list[mx.array], cached_len: int) -> float:
        cache = self._model.new_cache()
        start = 0
        if self._quantization and cached_len:  # rounded at the same depth
            start = cached_len
            self._model.model(mx.array([ids[:start]]), cache=cache)
            self._settle(cache)
        cold = self._rows(cache, ids, start)
        return max(_delta(a, b) for a, b in zip(cold, warm, strict=True))


def _delta(a: mx.array, b: mx.array) -> float:
    largest: Any = mx.max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32))).item()
    return math.inf if math.isnan(largest) else float(largest)  # max() may drop a NaN


def switch_off_failed(store: PrefixStore, results: list[PathResult]) -> None:
    """A failed path is not used; without `restore` nothing is reused at all."""
    for result in results:
        if result.outcome == "failed":
            logger.warning("reuse path switched off name=%s", result.name)
            store.switch_off(result.name)
