"""mlx-lm's decode batch, and how a sequence joins it."""

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler

from sidecar.cache.kv_layers import (
    KVLayers,
    from_only_row,
    lend_layers,
    to_batch,
)
from sidecar.engine.job import JobSpec
from sidecar.engine.loader import LoadedModel
from sidecar.engine.sampling import (
    LogitsProcessor,
    make_row_processors,
    make_row_sampler,
)


class DecodeBatch(GenerationBatch):  # type: ignore[misc]
    """
    mlx-lm's batch, which keeps the plain caches of a first row while it is alone.

    Alone, a row needs no mask against padding and no copy at its start or end.
    """

    prompt_cache: KVLayers
    _is_plain = False

    def extend(self, batch: "DecodeBatch") -> None:
        """Add another batch's rows; its caches are taken over."""
        if self.uids:
            self._to_batch()
            batch._to_batch()
        else:
            self._is_plain = batch._is_plain
        super().extend(batch)

    def filter(self, keep: list[int]) -> None:
        """Keep only these rows."""
        alone = self.prompt_cache if self._is_plain and keep else None
        if alone is not None:
            self.prompt_cache = []  # the only row stays, and its caches as they are
        super().filter(keep)
        if alone is not None:
            self.prompt_cache = alone

    def extract_cache(self, idx: int) -> KVLayers:
        """The caches of a row."""
        if self._is_plain:
            return lend_layers(self.prompt_cache)
        if len(self.uids) == 1:
            return from_only_row(self.prompt_cache)
        return [layer.extract(idx) for layer in self.prompt_cache]

    def _to_batch(self) -> None:
        if self._is_plain:
            self.prompt_cache = to_batch(self.prompt_cache)
            self._is_plain = False

    def extract_row(self, uid: int) -> KVLayers:
        """The caches of a row by its number."""
        return self.extract_cache(self.uids.index(uid))

    def first_token(self) -> tuple[int, mx.array]:
        """
        What the step begun at construction sampled: an id and its log-probabilities.

        `next` says it again, but begins another step before: that one's time would
        be added to the first token's.
        """
        mx.eval(self._next_tokens, self._next_logprobs)
        return self._next_tokens.item(), self._next_logprobs[0]


def empty_batch(model: LoadedModel) -> DecodeBatch:
    """A batch without rows."""
    batch: DecodeBatch = DecodeBatch.empty(model.model, greedy_sampler)
    return batch


def batch_of_one(
    model: LoadedModel,
    uid: int,
    spec: JobSpec,
    choice: tuple[int, list[LogitsProcessor]],
    cache: KVLayers,
) -> DecodeBatch:
    """
    A batch of one sequence, its first step begun.

    Args:
        choice: which of the request's answers, and processors beside its own.
        cache: holds all of the prompt but its last token; taken over.
    """
    number, processors = choice
    window: list[int] = []
    if spec.top_logprobs is not None:  # bf16 would round them to eighths
        processors = [_in_float32, *processors]
    if spec.sampling.has_processors:
        processors = [*make_row_processors(spec.sampling), *processors]
        window = list(spec.model_ids[-spec.sampling.context_size - 1 : -1])
    batch = DecodeBatch(
        model.model,
        [uid],
        mx.array([spec.model_ids[-1]]),
        cache,
        [window],
        [make_row_sampler(spec.sampling, model.vocab_size, number)],
        greedy_sampler,
        [tuple(processors)],
        [StopSequences([[i] for i in sorted(model.stop_ids)])],
        [spec.max_tokens],
    )
    batch._is_plain = True
    return batch


def _in_float32(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.astype(mx.float32)
