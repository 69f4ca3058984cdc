"""
Decode batches: mlx-lm's, how a sequence joins one, and which one it joins.

mlx-lm pads every row of a batch to its longest: a 100-token row that joins one of 32k
tokens doubles its KV and slows both. But a batch of its own reads all the weights once
more for every token. So a row joins a batch where the padding is small beside the
weights, else it gets a batch of its own.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler

from sidecar.engine.constrained_row import ConstrainedRow, masked
from sidecar.engine.job import JobSpec
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.sampling import (
    Drawing,
    LogitsProcessor,
    make_row_processors,
    make_row_sampler,
)
from sidecar.engine.vision.vision_encoder import VisionInputs
from sidecar.kv.kv_layers import (
    KVLayers,
    Released,
    arrays_of,
    borrow_layers,
    from_only_row,
    release_freed_memory,
    row_of,
    share_offsets,
    to_batch,
    token_nbytes,
)


class TopLogprobs(NamedTuple):
    """A sampled token's log-probability, and the likeliest tokens with theirs."""

    own: float
    ids: list[int]
    values: list[float]


class DecodeBatch(GenerationBatch):  # type: ignore[misc]
    """
    mlx-lm's batch, which keeps the plain caches of a first row while it is alone.

    Alone, a row needs no mask against padding and no copy at its start or end.
    """

    prompt_cache: KVLayers
    _next_tokens: mx.array
    _next_logprobs: list[Any]
    _is_plain = False
    _drawing: Drawing | None = None
    printed_stops: Mapping[int, int] = MappingProxyType({})
    released = Released()

    def __init__(
        self,
        *arguments: Any,
        num_top: dict[int, int] | None = None,
        shifts: dict[int, int] | None = None,
        constrained: dict[int, ConstrainedRow] | None = None,
        **named: Any,
    ) -> None:
        """
        As mlx-lm's.

        Args:
            num_top: for each row whose log-probabilities are asked for, of how many
                alternatives.
            shifts: for each row with images, how far its positions are shifted.
            constrained: the rows that keep to a grammar.
        """
        self._constrained = constrained or {}
        self._num_top = num_top or {}
        self._shifts = shifts or {}
        self._reads_prompt = True
        super().__init__(*arguments, **named)
        self._reads_prompt = False

    def _step(self) -> tuple[list[int], list[TopLogprobs | None]]:
        """
        Begin the next step, then wait for the one before; as mlx-lm's, but leaner.

        On CUDA the host is the slower side: each array is an entry in a graph. So
        log-probabilities leave the device only where they are asked for, and then
        those few that are; rows are drawn for in one pass.
        """
        self._current_tokens = inputs = self._next_tokens
        self._current_logprobs = due = self._next_logprobs
        fed = inputs if self._reads_prompt else self._as_printed(inputs)
        extra = (self._vision_inputs(),) if self._shifts else ()
        logits = self.model(fed[:, None], self.prompt_cache, *extra)[:, -1, :]
        share_offsets(self.prompt_cache)
        contexts: list[mx.array] = []
        if any(self.logits_processors):
            logits = self._processed(logits, inputs, contexts)
        if self._constrained:
            logits = self._masked(logits, inputs)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._drawing is None or not self._drawing.serves(self.samplers):
            self._drawing = Drawing(self.samplers)
        self._next_tokens = self._drawing(logprobs)
        self._next_logprobs = [
            _likeliest(logprobs[row], self._next_tokens[row], self._num_top.get(uid))
            for row, uid in enumerate(self.uids)
        ]
        mx.async_eval(self._next_tokens, self._next_logprobs, contexts)  # type: ignore[no-untyped-call]
        mx.eval(inputs, due)
        tokens = cast(list[int], inputs.tolist())
        for said, token in zip(self.tokens, tokens, strict=True):
            said.append(token)
        return tokens, [_read(found) for found in due]

    def _masked(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Logits of which only what grammars let in is left."""
        if not self._reads_prompt:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # masks are made meanwhile
            sampled = cast(list[int], inputs.tolist())
            for uid, token in zip(self.uids, sampled, strict=True):
                if uid in self._constrained:
                    self._constrained[uid].take(token)
        return masked(logits, self.uids, self._constrained)

    def _vision_inputs(self) -> VisionInputs:
        shifts = [[self._shifts.get(uid, 0)] for uid in self.uids]
        return VisionInputs(shifts=mx.array(shifts))

    def _as_printed(self, sampled: mx.array) -> mx.array:
        """What stands in later prompts for what was sampled."""
        for stop, printed in self.printed_stops.items():
            sampled = mx.where(sampled == stop, printed, sampled)
        return sampled

    def _processed(
        self, logits: mx.array, inputs: mx.array, contexts: list[mx.array]
    ) -> mx.array:
        """Logits after each row's own processors, which see what it has said."""
        rows = []
        for row, processors in enumerate(self.logits_processors):
            changed = logits[row : row + 1]
            if processors:
                said = self._token_context[row].update_and_fetch(inputs[row : row + 1])
                contexts.append(said)
                for processor in processors:
                    changed = processor(said, changed)
            rows.append(changed)
        return mx.concatenate(rows, axis=0)

    def extend(self, batch: "DecodeBatch") -> None:
        """Add another batch's rows; its caches are taken over."""
        if self.uids:
            self._to_batch()
            batch._to_batch()
        else:
            self._is_plain = batch._is_plain
        self._num_top |= batch._num_top
        self._shifts |= batch._shifts
        self._constrained |= batch._constrained
        super().extend(batch)

    def filter(self, keep: list[int]) -> None:
        """Keep only these rows; what the step in hand writes is held for a while."""
        if len(keep) < len(self.uids):
            said = [list(vars(tokens).values()) for tokens in self._token_context]
            drawn = [self._next_tokens, self._next_logprobs]
            self.released.hold([arrays_of(self.prompt_cache), drawn, said])
        alone = self.prompt_cache if self._is_plain and keep else None
        if alone is not None:
            self.prompt_cache = []  # the only row stays, and its caches as they are
        super().filter(keep)
        self._shifts = {u: s for u, s in self._shifts.items() if u in self.uids}
        rows = self._constrained.items()
        self._constrained = {u: row for u, row in rows if u in self.uids}
        if alone is not None:
            self.prompt_cache = alone

    def extract_cache(self, idx: int) -> KVLayers:
        """The caches of a row."""
        if self._is_plain:
            return borrow_layers(self.prompt_cache)
        if len(self.uids) == 1:
            return from_only_row(self.prompt_cache)
        return [row_of(layer, idx) for layer in self.prompt_cache]

    def _to_batch(self) -> None:
        if self._is_plain:
            self.prompt_cache = to_batch(self.prompt_cache)
            self._is_plain = False

    def extract_row(self, uid: int) -> KVLayers:
        """The caches of a row by its number."""
        return self.extract_cache(self.uids.index(uid))

    def constrained(self, uid: int) -> ConstrainedRow | None:
        """What follows a row's grammar; None: it has none."""
        return self._constrained.get(uid)

    def first_token(self) -> tuple[int, TopLogprobs | None]:
        """
        What the step begun at construction sampled: an id and its log-probabilities.

        `next` says it again, but begins another step before: that one's time would
        be added to the first token's.
        """
        mx.eval(self._next_tokens, self._next_logprobs)
        return cast(int, self._next_tokens.item()), _read(self._next_logprobs[0])


def empty_batch(model: LoadedModel, released: Released) -> DecodeBatch:
    """A batch without rows."""
    batch: DecodeBatch = DecodeBatch.empty(model.forward, greedy_sampler)
    batch.printed_stops, batch.released = model.printed_stops, released
    return batch


def batch_of_one(
    model: LoadedModel,
    uid: int,
    spec: JobSpec,
    cache: KVLayers,
    *,
    choice: int = 0,
    processors: Sequence[LogitsProcessor] = (),
    shift: int = 0,
) -> DecodeBatch:
    """
    A batch of one sequence, its first step begun.

    Args:
        cache: holds all of the prompt but its last token; taken over.
        choice: which of the request's answers. processors: beside its own.
        shift: how far its positions are from its number of tokens.
    """
    window: list[int] = []
    if spec.top_logprobs is not None:  # bf16 would round them to eighths
        processors = [_in_float32, *processors]
    if spec.sampling.has_processors:
        processors = [*make_row_processors(spec.sampling), *processors]
        window = list(spec.prompt.read_ids[-spec.sampling.context_size - 1 : -1])
    batch = DecodeBatch(
        model.forward,
        [uid],
        mx.array([spec.model_ids[-1]]),
        cache,
        [window],
        [make_row_sampler(spec.sampling, model.vocab_size, choice)],
        greedy_sampler,
        [tuple(processors)],
        [StopSequences([[i] for i in sorted(model.stop_ids)])],
        [spec.max_tokens],
        num_top={} if spec.top_logprobs is None else {uid: spec.top_logprobs},
        shifts={uid: shift} if shift else {},
        constrained=_constrained(uid, spec),
    )
    batch._is_plain = True
    return batch


def _constrained(uid: int, spec: JobSpec) -> dict[int, ConstrainedRow]:
    return {} if spec.constraint is None else {uid: ConstrainedRow(spec.constraint)}


def _in_float32(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.astype(mx.float32)


_Found = tuple[mx.array, mx.array, mx.array]


def _likeliest(logprobs: mx.array, token: mx.array, count: int | None) -> _Found | None:
    """On the device: all of a vocabulary is not worth the way to the host."""
    if count is None:
        return None
    places = mx.argpartition(-logprobs, kth=max(count - 1, 0), axis=-1)[:count]
    return logprobs[token], places, logprobs[places]


def _read(found: _Found | None) -> TopLogprobs | None:
    if found is None:
        return None
    own, ids, values = (cast(Any, array.tolist()) for array in found)
    best = sorted(zip(values, ids, strict=True), key=lambda pair: -pair[0])
    return TopLogprobs(own, [i for _, i in best], [value for value, _ in best])


_MAX_PADDING = 1 / 4  # bytes of padding over bytes of weights


class DecodeBatches:
    """The decode batches of one model. GPU thread only."""

    def __init__(self, model: LoadedModel, released: Released | None = None) -> None:
        self._released = Released() if released is None else released
        self.may_batch = True  # False: each row decodes in a batch of its own
        self._model = model
        self._batches: list[DecodeBatch] = []
        self._lengths: dict[int, int] = {}

    @property
    def has_rows(self) -> bool:
        """Whether any sequence is left."""
        return bool(self._batches)

    @property
    def arrays(self) -> list[mx.array]:
        """All that the caches of its batches hold."""
        return [a for batch in self._batches for a in arrays_of(batch.prompt_cache)]

    def settle(self) -> None:
        """
        Compute what nobody has read of the caches, and give back what was freed.

        Else each step's lazy change to it would be a buffer more, until the device
        takes no more (mlx-lm issues 1332, 1662, 1845).
        """
        mx.eval(self.arrays)
        release_freed_memory()

    def join(self, uid: int, single: DecodeBatch, length: int) -> None:
        """Add a batch of one sequence with `length` tokens to the fitting batch."""
        maximum = (
            _MAX_PADDING * self._model.num_bytes / token_nbytes(single.prompt_cache)
        )
        fitting = [b for b in self._batches if self._padding(b, length) <= maximum]
        if self._model.quantization or not self.may_batch:
            fitting = []  # mlx-lm's batch caches hold no quantised KV
        if fitting:
            min(fitting, key=lambda b: self._padding(b, length)).extend(single)
        else:
            batch = empty_batch(self._model, self._released)
            batch.extend(single)
            self._batches.append(batch)
        self._lengths[uid] = length

    def next(self) -> list[Any]:
        """
        One step of the next batch: mlx-lm's responses.

        If it raises, `drop_current` tells which sequences are lost.
        """
        if self._model.quantization:
            self._model.quantization.apply(self._batches[0].prompt_cache)
        responses: list[Any] = self._batches[0].next()
        for response in responses:
            self._lengths[response.uid] += 1
            if response.finish_reason is not None:
                del self._lengths[response.uid]
        self._batches.append(self._batches.pop(0))
        self._drop_empty()
        return responses

    def drop_current(self) -> list[int]:
        """Forget the next batch; the sequences that were in it."""
        lost = list(self._batches.pop(0).uids) if self._batches else []
        for uid in lost:
            self._lengths.pop(uid, None)
        return lost

    def extract(self, uid: int) -> KVLayers:
        """The caches of a sequence."""
        return self._of(uid).extract_row(uid)

    def remove(self, uids: Sequence[int]) -> None:
        """Take sequences out."""
        for batch in self._batches:
            keep = [i for i, uid in enumerate(batch.uids) if uid not in uids]
            if len(keep) < len(batch.uids):
                batch.filter(keep)
        for uid in uids:
            self._lengths.pop(uid, None)
        self._drop_empty()

    def _padding(self, batch: DecodeBatch, length: int) -> int:
        """Tokens of padding in a batch once a row of `length` has joined."""
        lengths = [*(self._lengths[uid] for uid in batch.uids), length]
        return len(lengths) * max(lengths) - sum(lengths)

    def _of(self, uid: int) -> DecodeBatch:
        return next(batch for batch in self._batches if uid in batch.uids)

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.uids]
