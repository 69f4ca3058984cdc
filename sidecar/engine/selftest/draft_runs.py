"""
The self-test's drafts: a run of tokens in one pass, against the same in plain steps.

The kernels of a run are others than one token's, so what differs is held against what
rounding does to this model on this device, as for a batch. On an H100 at a depth of
1,000 tokens the same plain steps, done twice, were as far apart as a run and plain
steps.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.engine.decode_batches import DecodeBatches
from sidecar.engine.job import JobSpec
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.selftest.array_distance import (
    Difference,
    logits_distance,
    rounding_of,
)
from sidecar.engine.selftest.rows import GREEDY, Rows, Steps, forced_tokens, forcing
from sidecar.engine.speculation.draft_length import LENGTHS
from sidecar.kv.kv_layers import KVLayers

_DEPTHS = (40, 150)


class DraftRuns:
    """
    Drafts of one model; GPU thread only.

    Args:
        ids: of a prompt, as long as the longest depth.
        filled: computes KV of a prompt in chunks.
    """

    def __init__(
        self,
        model: LoadedModel,
        ids: ModelIds,
        filled: Callable[[ModelIds, Sequence[int]], Steps[KVLayers]],
    ) -> None:
        self._model, self._ids, self._filled = model, ids, filled
        self._forced = forced_tokens(model, LENGTHS[-1] + 3)

    def run(self, noise: Callable[[], Steps[float]]) -> Steps[Difference]:
        """Each length at each depth, its last token wrong; then a plain step."""
        distances, rounding = [], 0.0
        for depth in _DEPTHS:
            ids = ModelIds(self._ids[:depth])
            plain = yield from self._plain(ids)
            rounding = rounding_of(plain[0])
            for length in LENGTHS:
                drafted = yield from self._drafted(ids, length)
                distances.append(logits_distance(plain[: len(drafted)], drafted))
        allowed = yield from noise()
        return Difference(0.0, max(distances), rounding, allowed)

    def _plain(self, ids: ModelIds) -> Steps[list[mx.array]]:
        rows = Rows(self._model, [(ids, (yield from self._prompt(ids)))])
        yield from rows.run(self._forced, joins_after=(0,))
        return rows.logits[0]

    def _drafted(self, ids: ModelIds, length: int) -> Steps[list[mx.array]]:
        """Logits of each token of a run, and of the plain step behind it."""
        cache, seen = (yield from self._prompt(ids)), list[mx.array]()
        spec = JobSpec(ModelPrompt(ids), GREEDY, len(self._forced))
        force = forcing(self._forced, seen)
        batch = DecodeBatches(self._model).begin(0, spec, cache, processors=[force])
        wrong = self._forced[length] + 1
        said = batch.speculate([*self._forced[:length], wrong])
        if len(said) != length:
            raise ValueError(f"{length} tokens were right, and {len(said)} were said")
        yield
        batch.next()
        mx.eval(seen)
        return seen

    def _prompt(self, ids: ModelIds) -> Steps[KVLayers]:
        return self._filled(ids, (len(ids) - 1,))
