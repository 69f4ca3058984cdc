"""
A text model's turns on the GPU thread: admit, restore, prefill, decode, commit.

Prompts are prefilled one at a time, in chunks, with caches of their own, so that a
chunk can end anywhere and a cancelled prompt's KV can be kept; then the sequence
joins mlx-lm's GenerationBatch, which decodes all of them in one forward pass.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

from sidecar.config.settings import EngineConfig
from sidecar.core.errors import (
    GenerationFailed,
    MemoryPressure,
    SidecarError,
    UnsupportedSchema,
)
from sidecar.core.events import TokenLogprob
from sidecar.core.prompt import ModelIds
from sidecar.engine.constrained_row import ConstrainedRow
from sidecar.engine.decode_batch import TopLogprobs
from sidecar.engine.decode_batches import DecodeBatches
from sidecar.engine.job import (
    ChoiceEnded,
    Job,
    JobFailed,
    Prefilled,
    Token,
)
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.weights import weights_count
from sidecar.engine.memory_model import MemoryGuard
from sidecar.engine.pacing import PrefillPacer, Watchdog
from sidecar.engine.prefill_queue import PrefillQueue
from sidecar.engine.process_memory import NOTHING, Admission, Demand, Running
from sidecar.engine.sampling import LogitsProcessor
from sidecar.engine.sequence import Sequence, begin_sequence
from sidecar.engine.speculation.lookup_drafter import LookupDrafter
from sidecar.engine.speculation.row_speculation import RowSpeculation
from sidecar.engine.speculation.speculating_batch import SpeculatingBatch
from sidecar.engine.step_ahead import AheadLimit
from sidecar.kv.kv_layers import (
    KVLayers,
    copy_layers,
    evaluate,
)
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.window_layers import forgets, windowed
from sidecar.output.stop_strings import StopStrings


@dataclass(eq=False)
class ChoiceRow:
    """What one choice of a job has generated. GPU thread only."""

    job: Job
    choice: int
    model: LoadedModel
    sequence: Sequence
    sampled: list[int] = field(default_factory=list)
    stop_string: str | None = None
    last_progress: float = field(default_factory=lambda: time.monotonic())
    longest_gap_s: float = 0.0
    is_first_taken: bool = False
    constrained: ConstrainedRow | None = None

    def __post_init__(self) -> None:
        self._detokenizer = _continuing(self.model.tokenizer.detokenizer)
        self._stops = StopStrings(self.job.spec.stop)

    @property
    def kv_ids(self) -> ModelIds:
        """The ids whose KV the row's cache holds once its last token was fed."""
        fed = [self.model.printed_stops.get(i, i) for i in self.sampled[-1:]]
        return ModelIds((*self.job.spec.model_ids, *self.sampled[:-1], *fed))

    def take_early(self, token_id: int, logprobs: TopLogprobs | None) -> None:
        """Take the first token before the batch says it."""
        self.take(token_id, logprobs)
        self.is_first_taken = True

    def take(self, token_id: int, logprobs: TopLogprobs | None) -> None:
        """Count a sampled token and tell the job's reader."""
        if self.is_first_taken:
            self.is_first_taken = False
            return
        if self.constrained is not None and self.constrained.error:
            why = self.constrained.error
            raise UnsupportedSchema(f"the answer could not be held to its form: {why}")
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_progress)
        self.last_progress = now
        self.sampled.append(token_id)
        if token_id in self.model.stop_ids:
            return
        self._detokenizer.add_token(token_id)
        shown = self._stops.feed(self._detokenizer.last_segment)
        self.stop_string = shown.stop
        logprob = self._logprob(token_id, logprobs)
        self.job.emit_later(Token(self.choice, shown.text, logprob))

    def end(
        self, reason: Literal["stop", "length"], *, is_aborted: bool = False
    ) -> None:
        """Flush what is held back and say how it ended."""
        text = ""
        if self.stop_string is None:
            self._detokenizer.finalize()
            last = self._stops.feed(self._detokenizer.last_segment)
            self.stop_string = last.stop
            text = last.text if last.stop else last.text + self._stops.flush()
        ids = self.sampled
        if ids and ids[-1] in self.model.stop_ids:
            ids = ids[:-1]
        if self.stop_string is not None:
            reason = "stop"
        self.job.emit(
            ChoiceEnded(
                self.choice, text, reason, self.stop_string, tuple(ids), is_aborted
            )
        )

    def _logprob(self, token_id: int, found: TopLogprobs | None) -> TokenLogprob | None:
        if found is None:
            return None
        decode: Any = self.model.tokenizer.decode
        pairs = zip(found.ids, found.values, strict=True)
        top = tuple((decode([i]), i, value) for i, value in pairs)
        return TokenLogprob(decode([token_id]), token_id, found.own, top)


def _continuing(detokenizer: Any) -> Any:
    """
    A detokenizer in mid-text: a byte-level one drops a space before its first word.

    A text goes on where its prompt ends, so the space belongs to it.
    """
    if isinstance(detokenizer, BPEStreamingDetokenizer):
        detokenizer.text, detokenizer.offset = " ", 1
    return detokenizer


logger = logging.getLogger(__name__)

# Beside the settings of a request: what a test harness wants to add to each row.
ExtraProcessors = Callable[[Job, int], list[LogitsProcessor]]
_STEPS_BETWEEN_CLEARS = 512
_WINDOW_CHUNK = 512  # tokens: the mask of a window has a row for each of them
_MASK_BYTES = 4  # of a place in it, while it is made
# After a first token its reader runs before the next step's graph takes the GIL.
_HAND_OVER_S = 50e-6


def no_extra_processors(_job: Job, _choice: int) -> list[LogitsProcessor]:
    """The production choice."""
    return []


class BatchScheduler:
    """The worker of one text model. All methods on the GPU thread."""

    is_background = is_for_idle = False

    def __init__(
        self,
        model: LoadedModel,
        store: PrefixStore,
        config: EngineConfig,
        guard: MemoryGuard,
        admission: Admission,
        rate_s: float | None = None,
        extra_processors: ExtraProcessors = no_extra_processors,
    ) -> None:
        self.guard = guard
        self.admission = admission
        self._model = model
        self._store = store
        self._extra_processors = extra_processors
        self._max_rows = config.batch_max_size if config.enable_batching else 1
        self.pacer = PrefillPacer(
            config.prefill_step_size, config.decode_stall_ms / 1000, rate_s
        )
        self._rows: dict[int, ChoiceRow] = {}
        self._uncount = admission.count_rows(lambda: len(self._rows))
        self._next_uid = 0
        self._num_steps = 0
        self._decode_batches = DecodeBatches(
            model,
            store.budget.released,
            self.hand_over,
            AheadLimit(model.max_rows_ahead),
        )
        models = [one.model for one in (model, model.draft) if one]
        num_weights = sum(map(weights_count, models))
        running = Running(num_weights, lambda: self._arrays)
        self._unwatch = guard.process.watch(running)
        self._watchdog = Watchdog(config.watchdog_s, config.deadline_s)
        self.prefills = PrefillQueue(
            store,
            config,
            self._watchdog,
            lambda job: begin_sequence(job, store, config.checkpoint_gap),
            lambda: self.pacer.chunk_len(beside_streams=False),
        )

    def has_work(self) -> bool:
        """Whether any job waits or runs."""
        return bool(self.prefills or self._rows)

    def close(self) -> None:
        """Count no more among the models that decode; repeatable."""
        self._uncount()
        self._unwatch()

    def may_batch(self, is_allowed: bool) -> None:
        """Whether rows that join from now on may share a forward pass."""
        self._decode_batches.may_batch = is_allowed

    def may_go_ahead(self, is_allowed: bool) -> None:
        """Whether decode steps are described before their turn, where they can be."""
        self._decode_batches.may_go_ahead(is_allowed)

    @property
    def has_failed_ahead(self) -> bool:
        """Whether a step could not be described before its turn; any thread."""
        return self._decode_batches.ahead_limit.has_failed

    def may_speculate(self, is_allowed: bool) -> None:
        """Whether drafts are tried."""
        self._decode_batches.may_speculate = is_allowed

    def has_streams(self) -> bool:
        """Whether rows decode."""
        return bool(self._rows)

    def hand_over(self) -> None:
        """Let the readers have the tokens of the last step."""
        for row in self._rows.values():
            row.job.hand_over()

    def decode(self, *, is_free: bool) -> float:
        """A decode step; a failure ends the jobs it hit. The seconds that count."""
        before = self._begun()
        counted_s = 0.0
        try:
            self._drop_ended()
            if self._rows:
                started = time.perf_counter()
                self._decode()
                seconds = time.perf_counter() - started
                counted_s = self.pacer.decoded(seconds, is_free=is_free)
                self.guard.process.count_in_time()
        except BaseException as error:
            logger.exception("decode step failed model=%s", self._model.name)
            self._decode_batches.give_up_next(error)
        self._end_lost()
        if before != self._begun():
            self._sample()
        if self.prefills:
            self.hand_over()
        return counted_s

    def interrupt(self, *, beside_streams: bool) -> bool:
        """A prefill chunk; a failure ends its job. Whether there was one to do."""
        if not self.prefills:
            return False
        before = self._begun()
        sequence = None
        try:
            self._drop_ended()
            if sequence := self.prefills.next(self._free_rows()):
                started = time.perf_counter()
                self._prefill_chunk(sequence, beside_streams=beside_streams)
                self.prefills.took(time.perf_counter() - started)
        except BaseException:
            logger.exception("a turn failed model=%s", self._model.name)
        self._end_lost()
        if sequence or before != self._begun():
            self._sample()
        return sequence is not None

    @property
    def adapters(self) -> set[int]:
        """Rows of the bank of adapters that what waits or runs is read with."""
        jobs = [*self.prefills.jobs, *(row.job for row in self._rows.values())]
        return {job.spec.prompt.adapter for job in jobs}

    @property
    def _arrays(self) -> list[mx.array]:
        """What its running requests hold."""
        begun = [a for sequence in self.prefills.begun for a in sequence.arrays]
        draft = self._decode_batches.draft_model
        return begun + self._decode_batches.arrays + (draft.arrays if draft else [])

    def _free_rows(self) -> int:
        return min(self._max_rows - len(self._rows), self.admission.free_rows())

    def _begun(self) -> tuple[object, ...]:
        return (*self._rows, *self.prefills.begun)

    def _drop_ended(self) -> None:
        self.prefills.drop_ended()
        self._drop_rows()
        self.guard.process.relieve()

    def _sample(self) -> None:
        """Note what is in use, and what the jobs begun will take beyond that."""
        self.guard.process.sample()
        for sequence in self.prefills.begun:
            spec = sequence.job.spec
            done = min(sequence.done, spec.num_kept)
            rest = self.guard.model.rest(spec.num_kept, spec.n, done)
            sequence.job.due = rest
        for row in self._rows.values():
            row.job.due = NOTHING

    def _end_lost(self) -> None:
        """End the jobs with a row that no batch holds: an error has cost it."""
        while (fault := self._decode_batches.take_fault()) is not None:
            held = self._decode_batches.uids
            lost = {row.job for uid, row in self._rows.items() if uid not in held}
            for job in lost:
                self._fail(job, fault)

    def _fail(self, job: Job, error: BaseException) -> None:
        """End a job, and all its rows in whatever batch."""
        failure: SidecarError = GenerationFailed(f"the engine failed: {error}")
        if isinstance(error, UnsupportedSchema):
            failure = error  # the request's fault, which nobody else can mend
        self._end(job, failure)

    def _end(self, job: Job, failure: SidecarError) -> None:
        """
        Tell a job why it ends; its rows leave, and nothing of them is kept.

        It raises nothing: others may be still to be told.
        """
        uids = [uid for uid, row in self._rows.items() if row.job is job]
        rows = [self._rows.pop(uid) for uid in uids]
        self._decode_batches.remove(uids)
        for row in rows:
            self._abandon(row.sequence)
        job.emit(JobFailed(failure))

    def _abandon(self, sequence: Sequence) -> None:
        try:
            sequence.abandon(self._store)
        except BaseException:
            logger.exception("a sequence was not let go model=%s", self._model.name)

    def _drop_rows(self) -> None:
        """End who was cancelled, made no progress or took too long."""
        gone = [uid for uid, row in self._rows.items() if row.job.is_cancelled]
        if gone:
            self._remove_rows(gone)
        late = {uid: row for uid, row in self._rows.items() if self._is_late(row)}
        if late:
            self._remove_rows(list(late))
        for row in late.values():
            row.end("length", is_aborted=True)

    def _is_late(self, row: ChoiceRow) -> bool:
        is_over = self._watchdog.is_over(row.sequence.began, row.last_progress)
        gap_s = max(row.longest_gap_s, row.sequence.longest_gap_s)
        return is_over or self._watchdog.is_stall(gap_s)

    def _prefill_chunk(self, sequence: Sequence, *, beside_streams: bool) -> None:
        try:
            sequence.open(self._model.vision_encoder)
            if sequence.done < sequence.target:
                self._compute(sequence, beside_streams=beside_streams)
            if sequence.done == sequence.target:
                self.prefills.done()
                self._begin_decode(sequence)
        except MemoryPressure as error:
            self.prefills.give_up(sequence)
            self._sample()
            sequence.job.emit(JobFailed(error))
        except BaseException as error:
            logger.exception("prefill failed model=%s", self._model.name)
            self.prefills.done()
            self._abandon(sequence)
            failure = GenerationFailed(f"the prompt could not be computed: {error}")
            self._end(sequence.job, failure)

    def _compute(self, sequence: Sequence, *, beside_streams: bool) -> None:
        if sequence.done == sequence.cached_len > 0:
            evaluate(sequence.layers)  # a copy is in use from here on, its source free
        is_patient = beside_streams or sequence.job.spec.prompt.is_batch
        chunk = self.pacer.chunk_len(beside_streams=is_patient)
        window, quantization = sequence.job.spec.window, self._model.quantization
        held = min(sequence.done, window or sequence.done)
        chunk = self.guard.fitting_chunk(held, chunk)
        if sequence.has_rotated:
            chunk = min(chunk, _WINDOW_CHUNK)
        seams = [window] if window else [quantization.start] if quantization else []
        end = sequence.end_of_chunk(chunk, seams)
        if unseen := sequence.unseen(end):
            self._make_room(sequence, self.guard.images([unseen]).total)
            sequence.encode(end)
            return
        num_new = end - sequence.done
        needed = self.guard.model.peak_bytes(held + num_new, num_new)
        if sequence.has_rotated:
            needed += _MASK_BYTES * num_new * (held + num_new)
        self._make_room(sequence, needed)
        ids = sequence.job.spec.prompt.read_ids
        started = time.perf_counter()
        token_array = mx.array([ids[sequence.done : end]])
        self._model.forward(
            token_array,
            sequence.layers,
            sequence.vision_inputs(end),
            (sequence.job.spec.prompt.adapter,),
        )
        if quantization:
            quantization.apply(sequence.layers)
        evaluate(sequence.layers)
        self.pacer.prefilled(num_new, time.perf_counter() - started)
        sequence.advance(end)
        if end == window:  # and the prompt goes on
            sequence.rotate(self._store, sequence.done_ids)
        sequence.job.emit(Prefilled(end, len(ids), sequence.cached_len))

    def _make_room(self, sequence: Sequence, needed: int) -> None:
        if self.guard.process.relieve(needed):
            return
        # A checkpoint only saves work later: no request fails for the sake of one.
        for begun in (*self.prefills.begun, *(r.sequence for r in self._rows.values())):
            begun.checkpoints.clear()
        if self.guard.process.relieve(needed):
            return
        self._sample()
        others = sum((p.job.due for p in self.prefills.begun if p != sequence), NOTHING)
        done = min(sequence.done, sequence.job.spec.num_kept)
        own = self.guard.model.kv_bytes(done)  # it would be free at the start
        spec, others = sequence.job.spec, others + Demand(-own, 0)
        length = spec.num_kept
        why = self.guard.refusal(length, spec.n, length, others)
        raise MemoryPressure(why, param="messages", retry_after_s=5)

    def _begin_decode(self, sequence: Sequence) -> None:
        self._store.budget.released.clear_later()
        sequence.register(self._store)
        for choice in reversed(range(sequence.job.spec.n)):
            layers = sequence.layers if choice == 0 else copy_layers(sequence.layers)
            self._join(ChoiceRow(sequence.job, choice, self._model, sequence), layers)

    def _join(self, row: ChoiceRow, layers: KVLayers) -> None:
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        more = self._extra_processors(row.job, row.choice)
        spec, batches = row.job.spec, self._decode_batches
        single = batches.begin(
            uid,
            spec,
            layers,
            choice=row.choice,
            processors=more,
            shift=row.sequence.shift,
        )
        row.constrained = single.constrained(uid)
        try:
            row.take_early(*single.first_token())
            row.job.hand_over()
            time.sleep(_HAND_OVER_S)
        finally:
            single.end_description()
        speculation = self._speculation(row, single)
        length = len(spec.model_ids)
        batches.join(uid, single, length, speculation, spec.window)
        self._rows[uid] = row
        if row.choice == 0:
            row.sequence.enter_batch(lambda: batches.extract(uid))

    def _speculation(
        self, row: ChoiceRow, single: SpeculatingBatch
    ) -> RowSpeculation | None:
        spec, batches = row.job.spec, self._decode_batches
        if spec.sources is None or row.job.has_rotated:
            return None
        draft, read = batches.draft_model, spec.prompt.read_ids
        speculation = RowSpeculation(
            LookupDrafter(spec.sources, read),
            batches.prices,
            self._model.syntax.opener_ids,
            row.constrained,
            None if draft is None else draft.drafter(read, single.samplers[0]),
        )
        row.job.draft_counts = speculation.counts
        return speculation

    def _rotate(self, uid: int, row: ChoiceRow) -> None:
        """Let a row whose window is full forget from here on."""
        held = ModelIds(row.kv_ids[: row.job.spec.window])
        self.guard.process.relieve(self.guard.model.kv_bytes(len(held)))
        layers = self._decode_batches.extract(uid)
        if row.choice == 0:
            row.sequence.leave_batch(layers)
            row.sequence.rotate(self._store, held)
            layers = row.sequence.layers
            row.sequence.enter_batch(lambda: self._decode_batches.extract(uid))
        else:
            layers = windowed(layers)
            row.job.has_rotated |= forgets(layers)
        self._decode_batches.rotate(uid, layers)

    def _decode(self) -> None:
        for uid in self._decode_batches.full_windows():
            self._rotate(uid, self._rows[uid])
        # A run is longer than a step, and a prompt may begin between two steps only.
        is_awaited = bool(self.prefills) and self._free_rows() > 0
        responses = self._decode_batches.next(may_draft=not is_awaited)
        for place, response in enumerate(responses):
            if row := self._rows.get(response.uid):  # else its job failed just now
                self._take(response.uid, row, response, responses[place + 1 :])
        self._num_steps += 1
        if not self._num_steps % _STEPS_BETWEEN_CLEARS:
            self._decode_batches.settle()

    def _take(
        self, uid: int, row: ChoiceRow, response: Any, later: Collection[Any]
    ) -> None:
        """
        A row's next token; a failure there is its own job's.

        Args:
            later: what else this step said, of any row.
        """
        try:
            row.take(response.token, response.logprobs)
            if response.finish_reason is not None:
                self._finish(row, response.finish_reason, response.prompt_cache)
                del self._rows[uid]
            elif row.stop_string is not None:
                behind = sum(other.uid == uid for other in later)
                self._decode_batches.unsay(uid, behind)
                self._finish(row, "stop", self._decode_batches.extract(uid))
                self._remove_rows([uid])
        except UnsupportedSchema as error:  # its form's fault: the KV is sound
            logger.warning("row refused model=%s: %s", self._model.name, error)
            self._refuse(uid, row, response, error)
        except BaseException as error:  # a tokenizer's Rust code may panic
            logger.exception("row failed model=%s", self._model.name)
            self._fail(row.job, error)

    def _refuse(
        self, uid: int, row: ChoiceRow, response: Any, error: UnsupportedSchema
    ) -> None:
        """End a job with an error, and keep what its prompt computed."""
        if response.finish_reason is not None:  # it has left its batch
            del self._rows[uid]
            if row.choice == 0:
                row.sequence.leave_batch(response.prompt_cache)
                row.sequence.commit(self._store, row.job.spec.model_ids, None)
        of_job = [each for each, other in self._rows.items() if other.job is row.job]
        self._remove_rows(of_job)
        row.job.emit(JobFailed(error))

    def _finish(self, row: ChoiceRow, reason: str, layers: KVLayers) -> None:
        if row.choice == 0:  # before the reader knows: its next turn finds all of it
            row.sequence.leave_batch(layers)
            end = row.kv_ids if row.stop_string is None else None
            row.sequence.commit(self._store, row.kv_ids, end)
            self._sample()
        row.end("length" if reason == "length" else "stop")

    def _remove_rows(self, uids: list[int]) -> None:
        """Take rows out of the batch; what their prompts computed is kept."""
        for uid in uids:
            row = self._rows.pop(uid)
            if row.choice == 0 and row.sequence.state != "ended":
                self._keep_prompt(uid, row)
        self._decode_batches.remove(uids)

    def _keep_prompt(self, uid: int, row: ChoiceRow) -> None:
        """Give the KV of a row that ends early to the store; a failure is a miss."""
        try:
            row.sequence.leave_batch(self._decode_batches.extract(uid))
            row.sequence.commit(self._store, row.job.spec.model_ids, None)
        except BaseException:
            logger.exception("a row's KV is lost model=%s", self._model.name)
            self._abandon(row.sequence)
