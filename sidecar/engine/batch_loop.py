"""
A text model's turns on the GPU thread: admit, restore, prefill, decode, keep.

Prompts are prefilled one at a time, in chunks, with caches of their own, so that a
chunk can end anywhere and a cancelled prompt's KV can be kept; then the sequence
joins mlx-lm's GenerationBatch, which decodes all of them in one forward pass.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

from sidecar.config.settings import EngineConfig
from sidecar.core.errors import GenerationFailed, MemoryPressure
from sidecar.core.events import TokenLogprob
from sidecar.core.prompt import ModelIds
from sidecar.engine.decode_batch import Lanes, TopLogprobs, batch_of_one
from sidecar.engine.job import ChoiceEnded, Job, JobFailed, Prefilled, Token
from sidecar.engine.loader import LoadedModel
from sidecar.engine.memory_model import MemoryGuard
from sidecar.engine.pacing import PrefillPacer, Watchdog
from sidecar.engine.prefill import Prefill, PrefillQueue, keep
from sidecar.engine.process_memory import NOTHING, Admission, Demand, Running
from sidecar.engine.sampling import LogitsProcessor
from sidecar.engine.weights import weights_count
from sidecar.kv.kv_layers import (
    KVLayers,
    arrays_of,
    copy_layers,
    evaluate,
)
from sidecar.kv.prefix_store import PrefixStore
from sidecar.output.stop_strings import StopStrings


@dataclass(eq=False)
class Row:
    """What one choice of a job has generated. GPU thread only."""

    job: Job
    choice: int
    model: LoadedModel
    prefill: Prefill
    sampled: list[int] = field(default_factory=list)
    stop_string: str | None = None
    last_progress: float = field(default_factory=lambda: time.monotonic())
    longest_gap_s: float = 0.0
    is_ahead: bool = False

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
        self.is_ahead = True

    def take(self, token_id: int, logprobs: TopLogprobs | None) -> None:
        """Count a sampled token and tell the job's reader."""
        if self.is_ahead:
            self.is_ahead = False
            return
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
        self.job.emit(Token(self.choice, shown.text, logprob))

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
# After a first token its reader runs before the next step's graph takes the GIL.
_HAND_OVER_S = 50e-6


def no_extra_processors(_job: Job, _choice: int) -> list[LogitsProcessor]:
    """The production choice."""
    return []


class BatchLoop:
    """The worker of one text model. All methods on the GPU thread."""

    is_background = False

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
        self._rows: dict[int, Row] = {}
        self._uncount = admission.count_rows(lambda: len(self._rows))
        self._next_uid = 0
        self._num_steps = 0
        self._lanes = Lanes(model, store.budget.released)
        running = Running(weights_count(model.model), lambda: self._arrays)
        self._unwatch = guard.process.watch(running)
        self._watchdog = Watchdog(config.watchdog_s, config.deadline_s)
        self.prefills = PrefillQueue(store, config, self._watchdog)

    def has_work(self) -> bool:
        """Whether any job waits or runs."""
        return bool(self.prefills or self._rows)

    def close(self) -> None:
        """Count no more among the models that decode; repeatable."""
        self._uncount()
        self._unwatch()

    def may_batch(self, is_allowed: bool) -> None:
        """Whether rows that join from now on may share a forward pass."""
        self._lanes.may_batch = is_allowed

    def has_streams(self) -> bool:
        """Whether rows decode."""
        return bool(self._rows)

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
        except Exception as error:
            logger.exception("decode step failed model=%s", self._model.name)
            self._fail({self._rows[u].job for u in self._lanes.drop_current()}, error)
        if before != self._begun():
            self._sample()
        return counted_s

    def interrupt(self, *, beside_streams: bool) -> bool:
        """A prefill chunk; a failure ends its job. Whether there was one to do."""
        if not self.prefills:
            return False
        before = self._begun()
        prefill = None
        try:
            self._drop_ended()
            if prefill := self.prefills.next(self._free_rows()):
                started = time.perf_counter()
                self._prefill_chunk(prefill, beside_streams=beside_streams)
                self.prefills.took(time.perf_counter() - started)
        except Exception:
            logger.exception("a turn failed model=%s", self._model.name)
        if prefill or before != self._begun():
            self._sample()
        return prefill is not None

    @property
    def _arrays(self) -> list[mx.array]:
        """What its running requests hold."""
        begun = [a for p in self.prefills.begun for a in arrays_of(p.cache)]
        return begun + self._lanes.arrays

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
        for prefill in self.prefills.begun:
            spec = prefill.job.spec
            rest = self.guard.model.rest(len(spec.model_ids), spec.n, prefill.done)
            prefill.job.due = rest
        for row in self._rows.values():
            row.job.due = NOTHING

    def _fail(self, jobs: set[Job], error: Exception) -> None:
        """End jobs whose caches are lost, all their rows in whatever batch."""
        rows = [uid for uid, row in self._rows.items() if row.job in jobs]
        self._lanes.remove(rows)
        for uid in rows:
            self._store.abandon(self._rows.pop(uid).prefill.lease)
        for job in jobs:
            job.emit(JobFailed(GenerationFailed(f"the engine failed: {error}")))

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

    def _is_late(self, row: Row) -> bool:
        is_over = self._watchdog.is_over(row.prefill.began, row.last_progress)
        gap_s = max(row.longest_gap_s, row.prefill.longest_gap_s)
        return is_over or self._watchdog.is_stall(gap_s)

    def _prefill_chunk(self, prefill: Prefill, *, beside_streams: bool) -> None:
        try:
            prefill.open(self._model.eyes)
            if prefill.done < prefill.target:
                self._compute(prefill, beside_streams=beside_streams)
            if prefill.done == prefill.target:
                self.prefills.done()
                self._begin_decode(prefill)
        except MemoryPressure as error:
            self.prefills.give_up(prefill)
            self._sample()
            prefill.job.emit(JobFailed(error))
        except Exception as error:
            logger.exception("prefill failed model=%s", self._model.name)
            self.prefills.done()
            self._store.budget.released.hold(arrays_of(prefill.cache))
            self._store.abandon(prefill.lease)
            failure = GenerationFailed(f"the prompt could not be computed: {error}")
            prefill.job.emit(JobFailed(failure))

    def _compute(self, prefill: Prefill, *, beside_streams: bool) -> None:
        if prefill.done == prefill.cached_len > 0:
            evaluate(prefill.cache)  # a copy is in use from here on, its source free
        chunk = self.pacer.chunk_len(beside_streams=beside_streams)
        chunk = self.guard.fitting_chunk(prefill.done, chunk)
        end = prefill.end_of_chunk(chunk)
        if unseen := prefill.unseen(end):
            self._make_room(prefill, self.guard.images([unseen]).total)
            prefill.look(end)
            return
        needed = self.guard.model.peak_bytes(end, end - prefill.done)
        self._make_room(prefill, needed)
        ids = prefill.job.spec.prompt.read_ids
        started = time.perf_counter()
        told = mx.array([ids[prefill.done : end]])
        self._model.forward(told, prefill.cache, prefill.sight(end))
        if self._model.quantization:
            self._model.quantization.apply(prefill.cache)
        evaluate(prefill.cache)
        self.pacer.prefilled(end - prefill.done, time.perf_counter() - started)
        prefill.advance(end)
        prefill.job.emit(Prefilled(end, len(ids), prefill.cached_len))

    def _make_room(self, prefill: Prefill, needed: int) -> None:
        if self.guard.process.relieve(needed):
            return
        # A checkpoint only saves work later: no request fails for the sake of one.
        for begun in (*self.prefills.begun, *(r.prefill for r in self._rows.values())):
            begun.checkpoints.clear()
        if self.guard.process.relieve(needed):
            return
        self._sample()
        others = sum((p.job.due for p in self.prefills.begun if p != prefill), NOTHING)
        own = self.guard.model.kv_bytes(prefill.done)  # it would be free at the start
        spec, others = prefill.job.spec, others + Demand(-own, 0)
        length = len(spec.model_ids)
        why = self.guard.refusal(length, spec.n, length, others)
        raise MemoryPressure(why, param="messages", retry_after_s=5)

    def _begin_decode(self, prefill: Prefill) -> None:
        self._store.budget.released.clear_later()
        self._store.register(prefill.lease, prefill.done_ids)
        for choice in reversed(range(prefill.job.spec.n)):
            cache = prefill.cache if choice == 0 else copy_layers(prefill.cache)
            self._join(Row(prefill.job, choice, self._model, prefill), cache)

    def _join(self, row: Row, cache: KVLayers) -> None:
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        more = self._extra_processors(row.job, row.choice)
        spec, choice = row.job.spec, (row.choice, more)
        single = batch_of_one(self._model, uid, spec, choice, cache, row.prefill.shift)
        row.take_early(*single.first_token())
        self._lanes.join(uid, single, len(spec.model_ids))
        self._rows[uid] = row
        if row.choice == 0:
            row.prefill.cache = []
            row.prefill.lease.live = lambda: self._lanes.extract(uid)
        time.sleep(_HAND_OVER_S)

    def _decode(self) -> None:
        for response in self._lanes.next():
            if row := self._rows.get(response.uid):  # else its job failed just now
                self._take(response.uid, row, response)
        self._num_steps += 1
        if not self._num_steps % _STEPS_BETWEEN_CLEARS:
            self._lanes.settle()

    def _take(self, uid: int, row: Row, response: Any) -> None:
        """A row's next token; a failure there is its own job's."""
        try:
            row.take(response.token, response.logprobs)
            if response.finish_reason is not None:
                self._finish(row, response.finish_reason, response.prompt_cache)
                del self._rows[uid]
            elif row.stop_string is not None:
                self._finish(row, "stop", self._lanes.extract(uid))
                self._remove_rows([uid])
        except Exception as error:
            logger.exception("row failed model=%s", self._model.name)
            self._fail({row.job}, error)

    def _finish(self, row: Row, reason: str, cache: KVLayers) -> None:
        if row.choice == 0:  # before the reader knows: its next turn finds all of it
            row.prefill.cache = cache
            end = row.kv_ids if row.stop_string is None else None
            keep(self._store, row.prefill, row.kv_ids, end)
            self._sample()
        row.end("length" if reason == "length" else "stop")

    def _remove_rows(self, uids: list[int]) -> None:
        """Take rows out of the batch; what their prompts computed is kept."""
        for uid in uids:
            row = self._rows.pop(uid)
            if row.choice == 0 and not row.prefill.lease.is_over:
                row.prefill.cache = self._lanes.extract(uid)
                keep(self._store, row.prefill, row.job.spec.model_ids, None)
        self._lanes.remove(uids)
