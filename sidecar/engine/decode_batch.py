"""mlx-lm's decode batch, and how a sequence joins it."""

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler

from sidecar.cache.kv_layers import KVLayers, from_only_row, to_batch
from sidecar.engine.job import JobSpec
from sidecar.engine.loader import LoadedModel
from sidecar.engine.sampling import (
    LogitsProcessor,
    make_row_processors,
    make_row_sampler,
)


class DecodeBatch(GenerationBatch):  # type: ignore[misc]
    """mlx-lm's batch, whose only row's arrays move out without a copy."""

    def extract_cache(self, idx: int) -> KVLayers:
        """The caches of a row."""
        if len(self.uids) == 1:
            return from_only_row(self.prompt_cache)
        return [layer.extract(idx) for layer in self.prompt_cache]

    def extract_row(self, uid: int) -> KVLayers:
        """The caches of a row by its number."""
        return self.extract_cache(self.uids.index(uid))


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
    return DecodeBatch(
        model.model,
        [uid],
        mx.array([spec.model_ids[-1]]),
        to_batch(cache),
        [window],
        [make_row_sampler(spec.sampling, model.vocab_size, number)],
        greedy_sampler,
        [tuple(processors)],
        [StopSequences([[i] for i in sorted(model.stop_ids)])],
        [spec.max_tokens],
    )


def _in_float32(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.astype(mx.float32)
