"""
One decode batch: a forward pass gives each sequence in it its next token.

It is mlx-lm's GenerationBatch, with less work on the host, and with log-probabilities,
grammars and adapters for each row. Alone, a row keeps the plain caches of its prompt:
no mask against padding, no copy at its start or end.
"""

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from sidecar.engine.constrained_row import ConstrainedRow, masked
from sidecar.engine.gpu_thread import describing_thread
from sidecar.engine.sampling import Drawing, RowSampler
from sidecar.engine.step_ahead import (
    NEVER_AHEAD,
    AheadLimit,
    DescribedStep,
    Likeliest,
    SavedState,
    StepAhead,
)
from sidecar.engine.vision.vision_inputs import VisionInputs
from sidecar.kv.kv_layers import (
    EARLY_ROOM,
    KVLayers,
    Released,
    arrays_of,
    atoms,
    borrow_layers,
    from_only_row,
    has_room,
    make_room,
    row_of,
    share_offsets,
    to_batch,
)

logger = logging.getLogger(__name__)

_READER_S, _READERS_S = 0.25e-3, 3e-3  # most that one reader is given, and all


def nothing() -> None:
    """Do nothing."""


def for_readers_s(num_rows: int, spare_s: float) -> float:
    """
    How long readers that were woken have the interpreter before a step is described.

    Beside a description each of them would wait for it several times, and write its
    token late. They get half of the time to spare, if they need as much.

    Args:
        spare_s: what MLX took in the step before, beyond the time of its description.
    """
    return max(0.0, min(spare_s / 2, num_rows * _READER_S, _READERS_S))


class TopLogprobs(NamedTuple):
    """A sampled token's log-probability, and the likeliest tokens with theirs."""

    own: float
    ids: list[int]
    values: list[float]


class DecodeBatch(GenerationBatch):  # type: ignore[misc]
    """
    mlx-lm's batch, which keeps the plain caches of a first row while it is alone.

    `before_wait` is called where MLX begins to encode a step: from there on this thread
    needs the interpreter for a small part of the step's time. Who is woken sooner holds
    it up.

    The next step is described by another thread meanwhile (step_ahead), unless a row
    ends for certain, buffers grow, or a mask hangs on what is drawn.
    """

    prompt_cache: KVLayers
    _next_tokens: mx.array
    _next_logprobs: list[Any]
    _is_plain = False
    _drawing: Drawing | None = None
    stop_ids: Collection[int] = ()
    released = Released()
    before_wait: Callable[[], None] = staticmethod(nothing)
    _ahead: StepAhead | None = None
    _describing: Future[None] | None = None  # while the first token is told
    _waited_s = _describing_s = 0.0  # for MLX in the last step, and by its description

    def __init__(
        self,
        *arguments: Any,
        num_top: dict[int, int] | None = None,
        shifts: dict[int, int] | None = None,
        constrained: dict[int, ConstrainedRow] | None = None,
        adapters: dict[int, int] | None = None,
        printed_stops: Mapping[int, int] = MappingProxyType({}),
        ahead_limit: AheadLimit = NEVER_AHEAD,
        begins_alone: bool = False,
        **named: Any,
    ) -> None:
        """
        As mlx-lm's.

        Args:
            num_top: for each row whose log-probabilities are asked for, of how many
                alternatives.
            shifts: for each row with images, how far its positions are shifted.
            constrained: the rows that keep to a grammar.
            adapters: for each row that is read with an adapter, its row of the bank.
            printed_stops: what stands in later prompts for a stop token.
            ahead_limit: of how many rows steps are described ahead.
            begins_alone: whether the second step may be described beside the first.
        """
        self.printed_stops = printed_stops
        self.ahead_limit = ahead_limit if begins_alone else NEVER_AHEAD
        self._adapters = adapters or {}
        self._constrained = constrained or {}
        self._num_top = num_top or {}
        self._shifts = shifts or {}
        self._reads_prompt = self._is_first = True
        self._unfed: list[int] = []  # what was said and is not in the caches yet
        super().__init__(*arguments, **named)  # makes the first step, if there are rows
        self._reads_prompt = self._is_first = False
        self.ahead_limit = ahead_limit

    def _step(self) -> tuple[list[int], list[TopLogprobs | None]]:
        """
        Begin the next step, then wait for the one before; as mlx-lm's, but leaner.

        On CUDA the host is the slower side: each array is an entry in a graph. So
        log-probabilities leave the device only where they are asked for, and then
        those few that are; rows are drawn for in one pass.
        """
        self._current_tokens = inputs = self._next_tokens
        self._current_logprobs = due = self._next_logprobs
        step = self._take_ahead() or self._described_now(inputs)
        self._reads_prompt = False
        self._next_tokens, self._next_logprobs = step.tokens, step.logprobs
        self.before_wait()
        with self._going_ahead():
            began = time.perf_counter()
            mx.async_eval(*step)  # type: ignore[no-untyped-call]
            mx.eval(inputs, due)
            tokens = cast(list[int], inputs.tolist())
            self._waited_s = time.perf_counter() - began
        for said, token in zip(self.tokens, tokens, strict=True):
            said.append(token)
        return tokens, [read(found) for found in due]

    def _described_now(self, inputs: mx.array) -> DescribedStep:
        """The step behind these tokens, with room made for it."""
        early = EARLY_ROOM if self._reads_prompt else 0  # no reader waits for it yet
        make_room(self.prompt_cache, 1 + len(self._unfed) + early)
        return self._described(inputs)

    def _described(self, inputs: mx.array) -> DescribedStep:
        fed = inputs if self._reads_prompt else self._as_printed(inputs)
        extra = (self._vision_inputs(),) if self._shifts else ()
        fed = self._with_unfed(fed[:, None])
        logits = self._forward(fed, self.prompt_cache, *extra)[:, -1, :]
        share_offsets(self.prompt_cache)
        contexts: list[mx.array] = []
        if any(self.logits_processors):
            logits = self._processed(logits, inputs, contexts)
        if self._constrained:
            logits = self._masked(logits, inputs)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._drawing is None or not self._drawing.serves(self.samplers):
            self._drawing = Drawing(self.samplers)
        tokens = self._drawing(logprobs)
        found = [
            likeliest(logprobs[row], tokens[row], self._num_top.get(uid))
            for row, uid in enumerate(self.uids)
        ]
        return DescribedStep(tokens, found, contexts)

    @contextlib.contextmanager
    def _going_ahead(self) -> Iterator[None]:
        """Have the step behind the one in hand described meanwhile, where it can be."""
        if not self._can_go_ahead():
            yield
            return
        stream = mx.default_stream(mx.default_device())  # of this thread
        try:
            self._describing = describing_thread().begin(
                lambda: self._describe_ahead(stream)
            )
        except RuntimeError:  # the system gives no thread
            logger.exception("no more steps are described ahead: no thread can")
            self.ahead_limit.fail()
        try:
            yield
        except BaseException:
            self.end_description()
            raise
        if not self._is_first:  # nobody's first token is to wait for it
            self.end_description()

    def end_description(self) -> None:
        """Wait until the step behind the one in hand is described, if one is."""
        describing, self._describing = self._describing, None
        if describing is not None:
            describing.result()  # no deadline, as in turn: it is the same work

    def _can_go_ahead(self) -> bool:
        if self._constrained or len(self.uids) > self.ahead_limit.max_rows:
            return False
        left = map(int.__sub__, self.max_tokens, self._num_tokens)
        return min(left) > 1 and has_room(self.prompt_cache, 1)

    def _describe_ahead(self, stream: mx.Stream) -> None:
        """
        Called on the other thread, while this one waits for MLX.

        It returns nothing: whoever holds the state of before has the layers copied.
        """
        spare_s = self._waited_s - self._describing_s
        time.sleep(for_readers_s(len(self.uids), spare_s))
        began = time.perf_counter()
        before: SavedState | None = None
        try:
            before = SavedState(self._changed_by_a_step())
            with mx.stream(stream):
                self._ahead = StepAhead(self._described(self._next_tokens), before)
            self._describing_s = time.perf_counter() - began
        except BaseException:  # Rust code panics with what is no Exception
            if before is not None:
                before.restore()
            logger.exception("no more steps are described ahead: one could not be")
            self.ahead_limit.fail()

    def _changed_by_a_step(self) -> list[Any]:
        drawn_from = [s for s in self.samplers if isinstance(s, RowSampler)]
        return [*atoms(self.prompt_cache), *self._token_context, *drawn_from]

    def _take_ahead(self) -> DescribedStep | None:
        """The step that was described ahead, whose turn it is."""
        self.end_description()
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        self.ahead_limit.num_taken += 1
        return ahead.step

    def take_back(self) -> None:
        """Be as if the step behind the one in hand had not been described."""
        self.end_description()
        if self._ahead is not None:
            self._ahead.before.restore()
            self._ahead = None

    def _forward(self, fed: mx.array, cache: KVLayers, *extra: Any) -> mx.array:
        """Logits behind what is fed, each row read with its own adapter."""
        if not self._adapters:
            return cast(mx.array, self.model(fed, cache, *extra))
        rows = [self._adapters.get(uid, 0) for uid in self.uids]
        return cast(mx.array, self.model(fed, cache, *extra, adapters=rows))

    def _with_unfed(self, fed: mx.array) -> mx.array:
        if not self._unfed:
            return fed
        before, self._unfed = mx.array([self._unfed], fed.dtype), []
        return mx.concatenate([before, fed], axis=1)

    def _catch_up(self) -> None:
        """Have the caches hold all that was said."""
        if self._unfed:
            unfed, self._unfed = self._unfed, []
            self._forward(mx.array([unfed]), self.prompt_cache)

    def _masked(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Logits of which only what grammars let in is left."""
        if not self._reads_prompt:
            self.before_wait()
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
            own = slice(row, row + 1)
            changed = logits[own]
            if processors:
                changed, said = self._processed_row(row, changed, inputs[own])
                contexts.append(said)
            rows.append(changed)
        return mx.concatenate(rows, axis=0)

    def _processed_row(
        self, row: int, logits: mx.array, token: mx.array
    ) -> tuple[mx.array, mx.array]:
        """One row's logits behind a token, and what it has said with that."""
        said = self._token_context[row].update_and_fetch(token)
        for processor in self.logits_processors[row]:
            logits = processor(said, logits)
        return logits, said

    def extend(self, batch: "DecodeBatch") -> None:
        """Add another batch's rows; its caches are taken over."""
        if batch.ahead_limit is NEVER_AHEAD:
            self.ahead_limit = NEVER_AHEAD
        if self.uids:
            for each in (self, batch):
                each.take_back()
                each._to_batch()
        else:
            batch.end_description()
            self._is_plain, self._ahead = batch._is_plain, batch._ahead
        self._num_top |= batch._num_top
        self._shifts |= batch._shifts
        self._constrained |= batch._constrained
        self._adapters |= batch._adapters
        super().extend(batch)

    def num_left(self, uid: int) -> int:
        """How many tokens a row has still to say."""
        row = self.uids.index(uid)
        return cast(int, self.max_tokens[row] - self._num_tokens[row])

    def take_out(self, uid: int, layers: KVLayers) -> Self:
        """
        Move a row to a batch of its own, the step that is in hand with it.

        Args:
            layers: its caches from here on.
        """
        self.take_back()
        row = self.uids.index(uid)
        alone = copy.copy(self)
        alone.prompt_cache, alone._is_plain = layers, True
        alone.filter([row])
        self.filter([other for other in range(len(self.uids)) if other != row])
        return alone

    def filter(self, keep: list[int]) -> None:
        """Keep only these rows; what the step in hand writes is held for a while."""
        self.take_back()
        if len(keep) < len(self.uids):
            said = [list(vars(tokens).values()) for tokens in self._token_context]
            drawn = [self._next_tokens, self._next_logprobs]
            self.released.hold([arrays_of(self.prompt_cache), drawn, said])
        alone = self.prompt_cache if self._is_plain and keep else None
        if alone is not None:
            self.prompt_cache = []  # the only row stays, and its caches as they are
        super().filter(keep)
        self._shifts = {u: s for u, s in self._shifts.items() if u in self.uids}
        self._adapters = {u: a for u, a in self._adapters.items() if u in self.uids}
        rows = self._constrained.items()
        self._constrained = {u: row for u, row in rows if u in self.uids}
        if alone is not None:
            self.prompt_cache = alone
        elif len(self.uids) == 1 and not self._is_plain:
            self.prompt_cache = from_only_row(self.prompt_cache)
            self._is_plain = True

    def extract_cache(self, idx: int) -> KVLayers:
        """The caches of a row."""
        self.take_back()
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
        return cast(int, self._next_tokens.item()), read(self._next_logprobs[0])


def likeliest(
    logprobs: mx.array, token: mx.array, count: int | None
) -> Likeliest | None:
    """
    A token's log-probability, and the likeliest ones: `count` of them, in no order.

    On the device: all of a vocabulary is not worth the way to the host.
    """
    if count is None:
        return None
    places = mx.argpartition(-logprobs, kth=max(count - 1, 0), axis=-1)[:count]
    return logprobs[token], places, logprobs[places]


def read(found: Likeliest | None) -> TopLogprobs | None:
    """The same on the host, the likeliest first."""
    if found is None:
        return None
    own, ids, values = (cast(Any, array.tolist()) for array in found)
    best = sorted(zip(values, ids, strict=True), key=lambda pair: -pair[0])
    return TopLogprobs(own, [i for _, i in best], [value for value, _ in best])
