"""
Groups rows into decode batches by length, and says which batch has its turn.

mlx-lm pads every row of a batch to its longest: a 100-token row that joins one of 32k
tokens doubles its KV and slows both. But a batch of its own reads all the weights once
more for every token. So a row joins a batch where the padding is small beside the
weights, else it gets a batch of its own.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import greedy_sampler

from sidecar.engine.constrained_row import ConstrainedRow
from sidecar.engine.decode_batch import nothing
from sidecar.engine.job import JobSpec
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.sampling import (
    LogitsProcessor,
    make_row_processors,
    make_row_sampler,
)
from sidecar.engine.speculation.draft_length import DraftPrices
from sidecar.engine.speculation.draft_model import DraftModel
from sidecar.engine.speculation.row_speculation import Proposal, RowSpeculation
from sidecar.engine.speculation.speculating_batch import SpeculatingBatch
from sidecar.engine.step_ahead import NEVER_AHEAD, AheadLimit
from sidecar.kv.kv_layers import (
    KVLayers,
    Released,
    arrays_of,
    release_freed_memory,
    token_nbytes,
)

logger = logging.getLogger(__name__)


def _constrained(uid: int, spec: JobSpec) -> dict[int, ConstrainedRow]:
    return {} if spec.constraint is None else {uid: ConstrainedRow(spec.constraint)}


def _in_float32(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.astype(mx.float32)


_MAX_PADDING = 1 / 4  # bytes of padding over bytes of weights


class DecodeBatches:
    """
    The decode batches of one model; as DecodeBatch, GPU thread only.

    What raises while it changes a batch leaves that between two states: the batch is
    given up, and `take_fault` tells why. Its sequences are no batch's then (`uids`).

    Args:
        ahead_limit: of how many rows steps are described ahead; default: of none.
    """

    def __init__(
        self,
        model: LoadedModel,
        released: Released | None = None,
        before_wait: Callable[[], None] = nothing,
        ahead_limit: AheadLimit | None = None,
    ) -> None:
        self._released = Released() if released is None else released
        self._before_wait = before_wait
        self.may_speculate = True
        self.may_batch = True  # False: each row decodes in a batch of its own
        self._model = model
        self._batches: list[SpeculatingBatch] = []
        self._fault: BaseException | None = None
        self._lengths: dict[int, int] = {}
        self._windows: dict[int, int] = {}  # of the rows whose context may rotate
        self._rotated: set[int] = set()  # each in a batch of its own
        self.prices = DraftPrices()
        self.draft_model: DraftModel | None = None
        if model.draft is not None:
            self.draft_model = DraftModel(model.draft, model.vocab_size)
        self._speculating: dict[int, RowSpeculation] = {}
        self.ahead_limit = AheadLimit() if ahead_limit is None else ahead_limit
        # Whether rows whose processors are a test's, too: they see steps in vain then.
        self.tests_go_ahead = False
        self._was_plain = False  # the last step, so that the next one's time is its own

    @cached_property
    def begins_ahead(self) -> bool:
        """
        Whether a row's second step is described beside its first; GPU thread only.

        A CPU would compute its first token that much later.
        """
        return mx.default_device() != mx.cpu

    @property
    def has_rows(self) -> bool:
        """Whether any sequence is left."""
        return bool(self._batches)

    @property
    def uids(self) -> set[int]:
        """The sequences of all batches."""
        return {uid for batch in self._batches for uid in batch.uids}

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
        for batch in self._batches:
            batch.take_back()
        mx.eval(self.arrays)
        release_freed_memory()

    def may_go_ahead(self, is_allowed: bool) -> None:
        """Whether steps are described before their turn, from now on."""
        self.ahead_limit.allow(self._model.max_rows_ahead if is_allowed else 0)
        if not is_allowed:
            for batch in self._batches:
                batch.take_back()

    def begin(
        self,
        uid: int,
        spec: JobSpec,
        cache: KVLayers,
        *,
        choice: int = 0,
        processors: Sequence[LogitsProcessor] = (),
        shift: int = 0,
    ) -> SpeculatingBatch:
        """
        A batch of one sequence that is to join, its first step begun.

        Where no other row decodes, and a device computes, the step behind it is
        described meanwhile.

        Args:
            cache: holds all of the prompt but its last token; taken over.
            choice: which of the request's answers. processors: beside its own.
            shift: how far its positions are from its number of tokens.
        """
        model, window = self._model, list[int]()
        is_watched = bool(processors) and not self.tests_go_ahead
        if spec.top_logprobs is not None:  # bf16 would round them to eighths
            processors = [_in_float32, *processors]
        if spec.sampling.has_processors:
            processors = [*make_row_processors(spec.sampling), *processors]
            window = list(spec.prompt.read_ids[-spec.sampling.context_size - 1 : -1])
        batch = SpeculatingBatch(
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
            adapters={uid: spec.prompt.adapter} if spec.prompt.adapter else {},
            printed_stops=model.printed_stops,
            ahead_limit=NEVER_AHEAD if is_watched else self.ahead_limit,
            begins_alone=self.begins_ahead and not self.has_rows and spec.n == 1,
        )
        batch._is_plain = True
        return batch

    def join(
        self,
        uid: int,
        single: SpeculatingBatch,
        length: int,
        speculation: RowSpeculation | None = None,
        window: int | None = None,
    ) -> None:
        """
        Add what `begin` made of `length` tokens to the fitting batch.

        Args:
            window: tokens beyond which its context forgets its middle.
        """
        if window is not None and length > window:
            self._begin_alone(uid, single, length)
            self._windows[uid] = window
            return
        maximum = (
            _MAX_PADDING * self._model.num_bytes / token_nbytes(single.prompt_cache)
        )
        fitting = [b for b in self._batches if self._padding(b, length) <= maximum]
        fitting = [b for b in fitting if b.uids[0] not in self._rotated]
        if self._model.quantization or not self.may_batch:
            fitting = []  # mlx-lm's batch caches hold no quantised KV
        if fitting:
            batch = min(fitting, key=lambda b: self._padding(b, length))
            with self._changing(batch):
                batch.extend(single)
        else:
            batch = self._prepared(self._empty())
            batch.extend(single)
            self._batches.append(batch)
        self._lengths[uid] = length
        if window is not None:
            self._windows[uid] = window
        if speculation is not None:
            self._speculating[uid] = speculation

    def full_windows(self) -> list[int]:
        """Rows of the next batch that hold a whole window, and are to rotate first."""
        if not self._windows or not self._batches:
            return []
        batch = self._batches[0]
        return [
            uid
            for uid in batch.uids
            if uid not in self._rotated
            and self._lengths[uid] >= self._windows.get(uid, math.inf)
            and batch.num_left(uid) > 1  # the last one is fed to nobody
        ]

    def rotate(self, uid: int, layers: KVLayers) -> None:
        """
        Let a row go on with layers that forget, in a batch of its own.

        Args:
            layers: its caches, as windows.
        """
        self._end_speculation(uid)
        batch = self._of(uid)
        with self._changing(batch):
            alone = batch.take_out(uid, layers)
        self._drop_empty()
        self._begin_alone(uid, alone, self._lengths[uid], at=0)

    def _begin_alone(
        self, uid: int, single: SpeculatingBatch, length: int, at: int | None = None
    ) -> None:
        self._rotated.add(uid)
        self._lengths[uid] = length
        place = len(self._batches) if at is None else at
        self._batches.insert(place, self._prepared(single))

    def _empty(self) -> SpeculatingBatch:
        """A batch for any rows of this model."""
        batch: SpeculatingBatch
        batch = SpeculatingBatch.empty(self._model.forward, greedy_sampler)
        batch.printed_stops = self._model.printed_stops
        batch.ahead_limit = self.ahead_limit
        return batch

    def _prepared(self, batch: SpeculatingBatch) -> SpeculatingBatch:
        """The batch, as those of this model are."""
        model = self._model
        batch.stop_ids = model.stop_ids
        batch.released, batch.before_wait = self._released, self._before_wait
        return batch

    def next(self, *, may_draft: bool = True) -> list[Any]:
        """One step of the next batch: mlx-lm's responses."""
        batch = self._batches[0]
        with self._changing(batch):
            if self._model.quantization:
                self._model.quantization.apply(batch.prompt_cache)
            responses = (may_draft and self._speculated()) or self._stepped()
            for response in responses:
                self._lengths[response.uid] += 1
                if speculation := self._speculating.get(response.uid):
                    speculation.take(response.token)
                if response.finish_reason is not None:
                    self._forget(response.uid)
        self._batches.append(self._batches.pop(0))
        self._drop_empty()
        return responses

    def _stepped(self) -> list[Any]:
        """A plain step, its time noted where nothing but it was waited for."""
        batch, started = self._batches[0], time.perf_counter()
        responses: list[Any] = batch.next()
        if self._speculating and self._was_plain and len(responses) == 1:
            seconds = time.perf_counter() - started
            self.prices.stepped(seconds)
            if self.draft_model is not None:
                self.draft_model.prices.stepped(seconds)
        self._was_plain = True
        return responses

    def _speculated(self) -> list[Any]:
        """The tokens of a draft that were right, if there is one to try."""
        batch = self._batches[0]
        speculation = self._speculating.get(batch.uids[0])
        is_alone = self.may_speculate and len(self._batches) == 1
        if speculation is None or not (is_alone and batch.may_speculate):
            return []
        draft = self._before_change(batch.uids[0], speculation.draft(batch.drawn))
        if draft is None:
            return []
        started = time.perf_counter()
        responses = batch.speculate(draft.ids)
        if responses:
            seconds = draft.drafted_s + time.perf_counter() - started
            self._prices_of(draft).called(draft.num_drafted, seconds)
            speculation.note(draft, len(responses) - 1)
            self._was_plain = False
        return responses

    def _prices_of(self, draft: Proposal) -> DraftPrices:
        """A draft of the small model costs more than the call that tries it."""
        if draft.drafter == "model" and self.draft_model is not None:
            return self.draft_model.prices
        return self.prices

    def _before_change(self, uid: int, draft: Proposal | None) -> Proposal | None:
        """As much of a draft as is computed with KV of one kind, as plain steps do."""
        depth, ends = self._lengths[uid], [self._windows.get(uid, 0)]
        if self._model.quantization is not None:
            ends.append(self._model.quantization.start)
        room = min((end - depth for end in ends if end > depth), default=None)
        if draft is None or room is None:
            return draft
        ids = draft.ids[:room]
        return replace(draft, ids=ids) if ids else None

    @contextlib.contextmanager
    def _changing(self, batch: SpeculatingBatch) -> Iterator[None]:
        """Give the batch up if what is done with it raises."""
        uids = [*batch.uids]  # one that ends may have left it when the error comes
        try:
            yield
        except BaseException as error:
            self._give_up(batch, uids, error)
            raise

    def _give_up(
        self, batch: SpeculatingBatch, uids: Sequence[int], error: BaseException
    ) -> None:
        self._fault = error
        self._batches = [other for other in self._batches if other is not batch]
        for uid in {*uids, *batch.uids}:
            self._forget(uid)

    def give_up_next(self, error: BaseException) -> None:
        """Give the next batch up, unless one has been: else it would fail for ever."""
        if self._fault is None and self._batches:
            self._give_up(self._batches[0], (), error)
        self._fault = error

    def take_fault(self) -> BaseException | None:
        """Why a batch was given up since; None: none was."""
        fault, self._fault = self._fault, None
        return fault

    def extract(self, uid: int) -> KVLayers:
        """The caches of a sequence."""
        batch = self._of(uid)
        if len(batch.uids) > 1:
            return batch.extract_row(uid)
        with self._changing(batch):  # which may have to catch up with what it said
            return batch.extract_row(uid)

    def remove(self, uids: Sequence[int]) -> None:
        """Take sequences out; it raises nothing."""
        for batch in [*self._batches]:
            keep = [i for i, uid in enumerate(batch.uids) if uid not in uids]
            if len(keep) < len(batch.uids):
                try:
                    with self._changing(batch):
                        batch.filter(keep)
                except BaseException:
                    logger.exception("rows could not be taken out of their batch")
        for uid in uids:
            self._forget(uid)
        self._drop_empty()

    def _forget(self, uid: int) -> None:
        self._lengths.pop(uid, None)
        self._windows.pop(uid, None)
        self._rotated.discard(uid)
        self._end_speculation(uid)

    def _end_speculation(self, uid: int) -> None:
        if speculation := self._speculating.pop(uid, None):
            speculation.end()

    def unsay(self, uid: int, num_tokens: int) -> None:
        """Of a sequence's last draft so many tokens were said in vain: it had ended."""
        if speculation := self._speculating.get(uid):
            speculation.unsay(num_tokens)

    def _padding(self, batch: SpeculatingBatch, length: int) -> int:
        """Tokens of padding in a batch once a row of `length` has joined."""
        lengths = [*(self._lengths[uid] for uid in batch.uids), length]
        return len(lengths) * max(lengths) - sum(lengths)

    def _of(self, uid: int) -> SpeculatingBatch:
        return next(batch for batch in self._batches if uid in batch.uids)

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.uids]
