"""
Decode batches: mlx-lm's, how a sequence joins one, and which one it joins.

mlx-lm pads every row of a batch to its longest: a 100-token row that joins one of 32k
tokens doubles its KV and slows both. But a batch of its own reads all the weights once
more for every token. So a row joins a batch where the padding is small beside the
weights, else it gets a batch of its own.
"""

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
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
    RowSampler,
    make_row_processors,
    make_row_sampler,
)
from sidecar.engine.speculation import padded_kv
from sidecar.engine.speculation.draft_length import DraftPrices
from sidecar.engine.speculation.row_speculation import RowSpeculation
from sidecar.engine.vision.vision_encoder import VisionInputs
from sidecar.kv.kv_layers import (
    KVLayers,
    Released,
    arrays_of,
    borrow_layers,
    from_only_row,
    is_sliceable,
    release_freed_memory,
    restore_checkpoint,
    row_of,
    share_offsets,
    take_checkpoint,
    to_batch,
    token_nbytes,
    trim,
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
    stop_ids: Collection[int] = ()
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
        self._unfed: list[int] = []  # what was said and is not in the caches yet
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
        fed = self._with_unfed(fed[:, None])
        logits = self.model(fed, self.prompt_cache, *extra)[:, -1, :]
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

    @property
    def may_speculate(self) -> bool:
        """Whether a draft can be tried: for one row that is alone, of text alone."""
        is_free = not (self._constrained or self._shifts or self._unfed)
        return self._is_plain and len(self.uids) == 1 and is_free

    def speculate(self, draft: Sequence[int]) -> list[Any]:
        """
        Say as many tokens of a draft as would have been said without it.

        All of it goes through the model in one pass. At each place the row's own draw
        decides, with the key that it would have had: what it draws is said, and the
        first that is not the draft's ends the run. So the tokens are those of plain
        steps, whatever the draft is (docs/speculation.md).

        Args:
            draft: the token that is drawn already first. No stop token is tried.
        Returns:
            mlx-lm's responses, in order; none where nothing can be tried.
        """
        most = self.max_tokens[0] - self._num_tokens[0] - 1
        run = _before_any(draft[: max(most, 0)], self.stop_ids)
        if len(run) < 2 or self._next_tokens.tolist() != run[:1]:
            return []
        cache, fed, saved = self.prompt_cache, run, None
        if not is_sliceable(cache):
            saved = take_checkpoint(cache)
        elif padded_kv.needs_padding():
            fed = padded_kv.filled(run)
            cache = padded_kv.padded(cache, len(fed))
        logits = self.model(mx.array([fed]), cache)[0, : len(run)]
        logprobs, drawn = self._drawn_along(logits, mx.array(run))
        num_top = self._num_top.get(self.uids[0])
        found = [
            _likeliest(logprobs[place], drawn[place], num_top)
            for place in range(len(run))
        ]
        due = self._next_logprobs
        mx.eval(drawn, found, due)
        sampled = cast(list[int], drawn.tolist())
        pairs = zip(run[1:], sampled, strict=False)
        num_taken = next((n for n, (d, s) in enumerate(pairs) if d != s), len(run) - 1)
        said = run[: num_taken + 1]
        self._go_back(len(fed), run, len(said), saved)
        self._next_tokens = drawn[num_taken : num_taken + 1]
        self._next_logprobs = found[num_taken : num_taken + 1]
        self._num_tokens[0] += len(said)
        self.tokens[0] += said
        logprobs_said = map(_read, [*due, *found[:num_taken]])
        return [
            self.Response(self.uids[0], token, logprob, None, None, None)
            for token, logprob in zip(said, logprobs_said, strict=True)
        ]

    def _drawn_along(
        self, logits: mx.array, inputs: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Log-probabilities and draws at each place of a run, with its own history."""
        if processors := self.logits_processors[0]:
            rows = []
            for place in range(len(inputs)):
                said = self._token_context[0].update_and_fetch(
                    inputs[place : place + 1]
                )
                changed = logits[place : place + 1]
                for processor in processors:
                    changed = processor(said, changed)
                rows.append(changed)
            logits = mx.concatenate(rows, axis=0)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return logprobs, Drawing(self.samplers * len(inputs))(logprobs)

    def _go_back(
        self, num_fed: int, run: list[int], num_said: int, saved: list[Any] | None
    ) -> None:
        """
        Forget what was fed and not said.

        Layers that cannot be cut go back to where they were before the run, and all
        others with them: what was said of it is fed with the next token.
        """
        if num_fed == num_said:
            return
        num_wrong = len(run) - num_said
        if self.logits_processors[0]:
            self._token_context[0]._size -= num_wrong
        sampler = self.samplers[0]
        if isinstance(sampler, RowSampler):
            sampler.give_back(num_wrong)
        if saved is None:
            trim(self.prompt_cache, num_fed - num_said)
            return
        trim(self.prompt_cache, num_fed)
        restore_checkpoint(self.prompt_cache, saved)
        self._unfed = run[:num_said]

    def _with_unfed(self, fed: mx.array) -> mx.array:
        if not self._unfed:
            return fed
        before, self._unfed = mx.array([self._unfed], fed.dtype), []
        return mx.concatenate([before, fed], axis=1)

    def _catch_up(self) -> None:
        """Have the caches hold all that was said."""
        if self._unfed:
            unfed, self._unfed = self._unfed, []
            self.model(mx.array([unfed]), self.prompt_cache)

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
        self._catch_up()
        if self._is_plain:
            return borrow_layers(self.prompt_cache)
        if len(self.uids) == 1:
            return from_only_row(self.prompt_cache)
        return [row_of(layer, idx) for layer in self.prompt_cache]

    def _to_batch(self) -> None:
        self._catch_up()
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
    batch.printed_stops, batch.stop_ids = model.printed_stops, model.stop_ids
    batch.released = released
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


def _before_any(run: Sequence[int], ends: Collection[int]) -> list[int]:
    """The beginning of a run that has none of these."""
    return list(itertools.takewhile(lambda one: one not in ends, run))


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
        self.prices = DraftPrices()
        self._speculating: dict[int, RowSpeculation] = {}
        self._was_plain = False  # the last step, so that the next one's time is its own

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

    def join(
        self,
        uid: int,
        single: DecodeBatch,
        length: int,
        speculation: RowSpeculation | None = None,
    ) -> None:
        """Add a batch of one sequence with `length` tokens to the fitting batch."""
        if speculation is not None:
            self._speculating[uid] = speculation
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
        responses = self._speculated() or self._stepped()
        for response in responses:
            self._lengths[response.uid] += 1
            if speculation := self._speculating.get(response.uid):
                speculation.take(response.token)
            if response.finish_reason is not None:
                del self._lengths[response.uid]
                self._speculating.pop(response.uid, None)
        self._batches.append(self._batches.pop(0))
        self._drop_empty()
        return responses

    def _stepped(self) -> list[Any]:
        """A plain step, its time noted where nothing but it was waited for."""
        started = time.perf_counter()
        responses: list[Any] = self._batches[0].next()
        if self._speculating and self._was_plain and len(responses) == 1:
            self.prices.stepped(time.perf_counter() - started)
        self._was_plain = True
        return responses

    def _speculated(self) -> list[Any]:
        """The tokens of a draft that were right, if there is one to try."""
        batch = self._batches[0]
        speculation = self._speculating.get(batch.uids[0])
        if speculation is None or len(self._batches) > 1 or not batch.may_speculate:
            return []
        draft = self._before_quantising(batch.uids[0], speculation.draft())
        started = time.perf_counter()
        responses = batch.speculate(draft) if draft else []
        if responses:
            num_drafted = len(draft) - 1
            self.prices.called(num_drafted, time.perf_counter() - started)
            speculation.note(num_drafted, len(responses) - 1)
            self._was_plain = False
        return responses

    def _before_quantising(self, uid: int, draft: list[int]) -> list[int]:
        """As much of a draft as is computed with KV of one kind, as plain steps do."""
        quantization, depth = self._model.quantization, self._lengths[uid]
        if quantization is None or depth > quantization.start:
            return draft
        return draft[: quantization.start - depth + 1]

    def drop_current(self) -> list[int]:
        """Forget the next batch; the sequences that were in it."""
        lost = list(self._batches.pop(0).uids) if self._batches else []
        for uid in lost:
            self._forget(uid)
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
            self._forget(uid)
        self._drop_empty()

    def _forget(self, uid: int) -> None:
        self._lengths.pop(uid, None)
        self._speculating.pop(uid, None)

    def _padding(self, batch: DecodeBatch, length: int) -> int:
        """Tokens of padding in a batch once a row of `length` has joined."""
        lengths = [*(self._lengths[uid] for uid in batch.uids), length]
        return len(lengths) * max(lengths) - sum(lengths)

    def _of(self, uid: int) -> DecodeBatch:
        return next(batch for batch in self._batches if uid in batch.uids)

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.uids]
