"""
The self-test's computations: the same ids with reuse and without.

What is restored must be bit for bit what a fresh computation with the same chunk edges
holds, since a store only moves data. The logits that follow, of the same forced
tokens, must be equal as well, or, where a kernel is chosen by how a buffer lies in
memory, no further apart than rounding puts two honest computations of this model on
this device. A batch has other shapes and therefore other rounding: it is held against
that noise, its logits and the KV that it leaves.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from sidecar.core.prompt import ModelIds
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.selftest.array_distance import (
    Difference,
    kv_distance,
    logits_distance,
    rounding_of,
    states_distance,
)
from sidecar.engine.selftest.disk_way import Shelf
from sidecar.engine.selftest.draft_runs import DraftRuns
from sidecar.engine.selftest.image_runs import ImageRuns
from sidecar.engine.selftest.rows import Rows, Steps, forced_tokens
from sidecar.kv import kv_layers
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.kv.kv_layers import KVLayers
from sidecar.kv.prefix_store import PrefixStore

_NUM_TOKENS = 8


class Runs:
    """All tests of a model; GPU thread only."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        asked = model.quantization
        self._quantization = replace(asked, start=0) if asked else None
        if asked:
            self._model = replace(model, quantization=self._quantization)
        size = min(model.vocab_size, 997)
        self._ids = ModelIds(tuple((7 * i + 3) % size for i in range(160)))
        self._forced = forced_tokens(model, _NUM_TOKENS)
        self._noise: float | None = None
        self._rounding = 0.0

    def paths(self) -> list[tuple[str, Callable[[], Steps[Difference]]]]:
        """Name and test of each way of reuse; a test yields after each computation."""
        paths = [
            ("restore", lambda: self._warm((64,), self._ids[:96])),
            ("lend", lambda: self._warm((64,), self._ids[:96], borrow=True)),
            ("trim", lambda: self._warm((48, 96), self._ids[:80])),
            ("branch", self._branch),
            ("checkpoint", lambda: self._warm((64, 96), self._ids[:120])),
            ("disk", self._disk),
            ("batch", self._batch),
        ]
        if self._quantization:  # its rows run alone, and what is rounded hangs on when
            paths.pop()
        else:
            paths.insert(0, ("chunks", self._chunks))
        if self._model.max_rows_ahead:
            paths.append(("ahead", self._ahead))
        drafts = DraftRuns(self._model, self._ids, self._filled)
        paths.append(("verify", lambda: drafts.run(self._measured_noise)))
        if self._model.vision_encoder is not None:
            images = ImageRuns(self._model, self._model.vision_encoder, self._ids)
            paths.append(("images", lambda: images.run(self._measured_noise)))
        return paths

    def _chunks(self) -> Steps[Difference]:
        """
        A prompt's KV does not hang on where its chunks end, but by rounding.

        Else what stands behind changes what stands before, and nothing may be reused.
        """
        noise = yield from self._measured_noise()
        return Difference(0.0, noise, self._rounding, noise)

    def _warm(
        self, edges: Sequence[int], asked: Sequence[int], *, borrow: bool = False
    ) -> Steps[Difference]:
        """
        Store a prompt, ask for a second one that shares its beginning.

        Args:
            edges: of the first prompt's chunks; after the first of them they part.
        """
        common = edges[0]
        other = tuple(reversed(self._ids))
        first = ModelIds((*self._ids[:common], *other[: edges[-1] - common]))
        with self._store(borrow=borrow) as store:
            yield from self._serve(store, first, edges)
            return (yield from self._compare(store, ModelIds(tuple(asked)), edges[:1]))

    def _branch(self) -> Steps[Difference]:
        """Two prompts that part in the middle of a stored run, both served."""
        first = ModelIds(self._ids[:96])
        second = ModelIds((*self._ids[:64], *self._ids[100:130]))
        found = []
        with self._store(borrow=True) as store:
            for ids in (first, second):
                yield from self._serve(store, ids, (64, len(ids)))
            for ids in (first, second):
                longer = ModelIds((*ids, *self._ids[:5]))
                found.append((yield from self._compare(store, longer, (64, len(ids)))))
        return max(found, key=lambda d: (d.moved, d.computed))

    def _disk(self) -> Steps[Difference]:
        """A prompt of two slots, read by a store that never saw it."""
        ids = ModelIds(self._ids[:96])
        with (
            self._store(borrow=False) as before,
            self._store(borrow=False) as after,
            Shelf() as shelf,
        ):
            for end in (64, 96):
                yield from self._serve(before, ModelIds(ids[:end]), (64, end))
                shelf.write(before, ModelIds(ids[:end]))
                yield
            shelf.read(after, ids)
            yield
            longer = ModelIds((*ids, *self._ids[:5]))
            return (yield from self._compare(after, longer, (64, 96)))

    def _compare(
        self, store: PrefixStore, ids: ModelIds, edges: Sequence[int]
    ) -> Steps[Difference]:
        """A prompt restored, against it computed with the same edges."""
        restored = store.restore(ids)
        if restored.cached_len != edges[-1]:
            raise ValueError(f"restored {restored.cached_len}, stored {edges[-1]}")
        cold = self._model.new_cache()
        yield from self._compute(cold, ids, 0, edges)
        moved = max(
            kv_distance(cold, restored.cache, 0, edges[-1]),
            states_distance(cold, restored.cache),
        )
        store.abandon(restored.lease)
        rest = (len(ids) - 1,)
        warm = restored.cache
        for cache in (cold, warm):
            yield from self._compute(cache, ids, edges[-1], rest)
        expected = yield from self._say(cold, ids)
        found = yield from self._say(warm, ids)
        computed = logits_distance(expected, found)
        rounding = rounding_of(expected[0])
        noise = None if computed == 0.0 else (yield from self._measured_noise())
        return Difference(moved, computed, rounding, noise)

    def _batch(self) -> Steps[Difference]:
        """Rows that join and leave beside others give what they give alone."""
        lengths = (40, 90, 61)
        prompts = [ModelIds(self._ids[i : i + n]) for i, n in enumerate(lengths)]
        alone, beside = [], []
        for ids in prompts:
            alone.append(Rows(self._model, [(yield from self._cold(ids))]))
            beside.append((yield from self._cold(ids)))
        together = Rows(self._model, beside)
        yield from together.run(self._forced, joins_after=(0, 2, 3))
        distances = []
        for row, lone in enumerate(alone):
            yield from lone.run(self._forced, joins_after=(0,))
            distances.append(logits_distance(lone.logits[0], together.logits[row]))
            end = lengths[row] - 1
            stored = kv_distance(lone.caches[0], together.caches[row], 0, end)
            if stored:  # the prompt's KV was only moved from batch to batch
                return Difference(stored, max(distances), 0.0)
            distances.append(kv_distance(lone.caches[0], together.caches[row], end))
        rounding = rounding_of(alone[0].logits[0][0])
        noise = yield from self._measured_noise()
        return Difference(0.0, max(distances), rounding, noise)

    def _ahead(self) -> Steps[Difference]:
        """Steps described beside others compute what they compute in their turn."""
        prompts = [self._ids[:40], self._ids[1:62]]
        if self._model.max_rows_ahead < len(prompts):
            del prompts[1:]
        runs = list[Rows]()
        for goes_ahead in (False, True):
            rows = []
            for ids in prompts:
                rows.append((yield from self._cold(ModelIds(ids))))
            run = Rows(self._model, rows, goes_ahead=goes_ahead)
            yield from run.run(self._forced, joins_after=range(0, 3 * len(rows), 3))
            runs.append(run)
        in_turn, ahead = runs
        if ahead.ahead_limit.has_failed or not ahead.ahead_limit.num_taken:
            raise ValueError("no step could be described ahead")
        pairs = zip(in_turn.logits, ahead.logits, strict=True)
        distances = [logits_distance(one, other) for one, other in pairs]
        for one, other in zip(in_turn.caches, ahead.caches, strict=True):
            distances += [kv_distance(one, other, 0), states_distance(one, other)]
        computed = max(distances)
        noise = None if computed == 0.0 else (yield from self._measured_noise())
        rounding = rounding_of(in_turn.logits[0][0])
        return Difference(0.0, computed, rounding, noise)

    def _measured_noise(self) -> Steps[float]:
        """How far rounding puts computations apart that are all right."""
        if self._noise is None:
            ids, distances = ModelIds(self._ids[:90]), []
            usual = yield from self._row(ids, (89,))
            expected, cache = usual.logits[0], usual.caches[0]
            self._rounding = rounding_of(expected[0])
            for edges in ((23, 52, 89), (71, 89)):
                other = yield from self._row(ids, edges)
                distances.append(logits_distance(expected, other.logits[0]))
                distances.append(kv_distance(cache, other.caches[0], 0))
            at_once = yield from self._filled(ids, (89,))
            said = mx.array([[ids[-1], *self._forced[:-1]]])
            logits = self._model.forward(said, at_once)
            rows = [logits[:, i] for i in range(len(self._forced))]
            distances.append(logits_distance(expected[: len(rows)], rows))
            distances.append(kv_distance(cache, at_once, 89, 89 + len(rows)))
            self._noise = max(distances)
        return self._noise

    def _row(self, ids: ModelIds, edges: Sequence[int]) -> "Steps[Rows]":
        row = Rows(self._model, [(ids, (yield from self._filled(ids, edges)))])
        yield from row.run(self._forced, joins_after=(0,))
        return row

    @contextlib.contextmanager
    def _store(self, *, borrow: bool) -> Iterator[PrefixStore]:
        """Room for one test's prompts; their KV goes with it, at once."""
        budget = KVBudget(Limits(1 << 40))
        store = PrefixStore(budget, self._model.new_cache, self._quantization)
        if not borrow:
            store.switched_off.add("lend")
        try:
            yield store
        finally:
            store.forget()

    def _serve(
        self, store: PrefixStore, ids: ModelIds, edges: Sequence[int]
    ) -> Steps[None]:
        """Compute a prompt as a request does: what is stored of it is not."""
        restored = store.restore(ids)
        marks = {}
        start = restored.cached_len
        for edge in (e for e in edges if e > start):
            yield from self._compute(restored.cache, ids, start, (edge,))
            marks[edge] = (2, kv_layers.take_checkpoint(restored.cache))
            start = edge
        store.commit_kv(restored.lease, ids, restored.cache, marks)

    def _cold(self, ids: ModelIds) -> Steps[tuple[ModelIds, KVLayers]]:
        return ids, (yield from self._filled(ids, (len(ids) - 1,)))

    def _filled(self, ids: ModelIds, edges: Sequence[int]) -> Steps[KVLayers]:
        cache = self._model.new_cache()
        yield from self._compute(cache, ids, 0, edges)
        return cache

    def _compute(
        self, cache: KVLayers, ids: ModelIds, start: int, edges: Sequence[int]
    ) -> Steps[None]:
        """Prefill ids[start:] in chunks, each ended as the engine does."""
        for edge in edges:
            if edge <= start:
                continue
            self._model.forward(mx.array([ids[start:edge]]), cache)
            if self._quantization:
                self._quantization.apply(cache)
            kv_layers.evaluate(cache)
            start = edge
            yield

    def _say(self, cache: KVLayers, ids: ModelIds) -> Steps[list[mx.array]]:
        rows = Rows(self._model, [(ids, cache)])
        yield from rows.run(self._forced, joins_after=(0,))
        return rows.logits[0]
