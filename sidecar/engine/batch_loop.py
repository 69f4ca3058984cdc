"""
A text model's turns on the GPU thread: admit, restore, prefill, decode, keep.

Prompts are prefilled one at a time, in chunks, with caches of their own, so that a
chunk can end anywhere and a cancelled prompt's KV can be kept; then the sequence
joins mlx-lm's GenerationBatch, which decodes all of them in one forward pass.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from sidecar.config.settings import EngineConfig
from sidecar.core.errors import GenerationFailed, MemoryPressure
from sidecar.engine.decode_batch import batch_of_one
from sidecar.engine.job import NOTHING, Demand, Job, JobFailed, Prefilled
from sidecar.engine.length_batches import Lanes
from sidecar.engine.loader import LoadedModel
from sidecar.engine.memory import MemoryGuard
from sidecar.engine.pacing import PrefillPacer
from sidecar.engine.prefill import Prefill, keep
from sidecar.engine.prefill_queue import PrefillQueue
from sidecar.engine.sampling import LogitsProcessor
from sidecar.engine.sequence import Row
from sidecar.engine.watchdog import Watchdog
from sidecar.kv.kv_layers import KVLayers, copy_layers, evaluate
from sidecar.kv.prefix_store import PrefixStore

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

    def __init__(
        self,
        model: LoadedModel,
        store: PrefixStore,
        config: EngineConfig,
        guard: MemoryGuard,
        extra_processors: ExtraProcessors = no_extra_processors,
    ) -> None:
        self.guard = guard
        self._model = model
        self._store = store
        self._extra_processors = extra_processors
        self._max_rows = config.batch_max_size if config.enable_batching else 1
        self._max_rows = min(self._max_rows, config.max_concurrent)
        self.pacer = PrefillPacer(
            config.prefill_step_size, config.decode_stall_ms / 1000
        )
        self._rows: dict[int, Row] = {}
        self._next_uid = 0
        self._num_steps = 0
        self._lanes = Lanes(model)
        self._watchdog = Watchdog(config.watchdog_s, config.deadline_s)
        self.prefills = PrefillQueue(store, config, self._watchdog)

    def has_work(self) -> bool:
        """Whether any job waits or runs."""
        return bool(self.prefills or self._rows)

    def may_batch(self, is_allowed: bool) -> None:
        """Whether rows that join from now on may share a forward pass."""
        self._lanes.may_batch = is_allowed

    def step(self) -> None:
        """One prefill chunk or one decode step; a failure ends the jobs it hit."""
        before = (*self._rows, *self.prefills.begun)
        prefill = None
        try:
            self.prefills.drop_ended()
            self._drop_rows()
            self.guard.relieve(self._store.evict_bytes)
            if not self._rows or self.pacer.prefill_is_due:
                prefill = self.prefills.next(self._max_rows - len(self._rows))
            if prefill:
                started = time.perf_counter()
                self._prefill_chunk(prefill)
                self.prefills.took(time.perf_counter() - started)
            elif self._rows:
                self._decode()
        except Exception as error:
            logger.exception("decode step failed model=%s", self._model.name)
            self._fail({self._rows[u].job for u in self._lanes.drop_current()}, error)
        if prefill or before != (*self._rows, *self.prefills.begun):
            self._sample()

    def _sample(self) -> None:
        """Note what is in use, and what the jobs begun will take beyond that."""
        self.guard.sample()
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

    def _prefill_chunk(self, prefill: Prefill) -> None:
        try:
            if prefill.done < prefill.target:
                self._compute(prefill)
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
            self._store.abandon(prefill.lease)
            failure = GenerationFailed(f"the prompt could not be computed: {error}")
            prefill.job.emit(JobFailed(failure))

    def _compute(self, prefill: Prefill) -> None:
        if prefill.done == prefill.cached_len > 0:
            evaluate(prefill.cache)  # a copy is in use from here on, its source free
        chunk = self.pacer.chunk_len(beside_streams=bool(self._rows))
        chunk = self.guard.fitting_chunk(prefill.done, chunk)
        end = prefill.end_of_chunk(chunk)
        needed = self.guard.model.peak_bytes(end, end - prefill.done)
        self._make_room(prefill, needed)
        ids = prefill.job.spec.model_ids
        started = time.perf_counter()
        self._model.model(mx.array([ids[prefill.done : end]]), cache=prefill.cache)
        if self._model.quantization:
            self._model.quantization.apply(prefill.cache)
        evaluate(prefill.cache)
        mx.clear_cache()
        self.pacer.prefilled(end - prefill.done, time.perf_counter() - started)
        prefill.advance(end)
        prefill.job.emit(Prefilled(end, len(ids), prefill.cached_len))

    def _make_room(self, prefill: Prefill, needed: int) -> None:
        evict = self._store.evict_bytes
        if self.guard.relieve(evict, needed):
            return
        # A checkpoint only saves work later: no request fails for the sake of one.
        for begun in (*self.prefills.begun, *(r.prefill for r in self._rows.values())):
            begun.checkpoints.clear()
        if self.guard.relieve(evict, needed):
            return
        self._sample()
        others = sum((p.job.due for p in self.prefills.begun if p != prefill), NOTHING)
        own = self.guard.model.kv_bytes(prefill.done)  # it would be free at the start
        spec, others = prefill.job.spec, others + Demand(-own, 0)
        length = len(spec.model_ids)
        why = self.guard.refusal(length, spec.n, length, others)
        raise MemoryPressure(why, param="messages", retry_after_s=5)

    def _begin_decode(self, prefill: Prefill) -> None:
        self._store.register(prefill.lease, prefill.done_ids, prefill.owner)
        for choice in reversed(range(prefill.job.spec.n)):
            cache = prefill.cache if choice == 0 else copy_layers(prefill.cache)
            self._join(Row(prefill.job, choice, self._model, prefill), cache)

    def _join(self, row: Row, cache: KVLayers) -> None:
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        more = self._extra_processors(row.job, row.choice)
        spec, choice = row.job.spec, (row.choice, more)
        single = batch_of_one(self._model, uid, spec, choice, cache)
        row.take_early(*single.first_token())
        self._lanes.join(uid, single, len(spec.model_ids))
        self._rows[uid] = row
        if row.choice == 0:
            row.prefill.cache = []
            row.prefill.lease.live = lambda: self._lanes.extract(uid)
        time.sleep(_HAND_OVER_S)

    def _decode(self) -> None:
        started = time.perf_counter()
        for response in self._lanes.next():
            if row := self._rows.get(response.uid):  # else its job failed just now
                self._take(response.uid, row, response)
        self._num_steps += 1
        if not self._num_steps % _STEPS_BETWEEN_CLEARS:
            mx.clear_cache()
        self.pacer.decoded(time.perf_counter() - started)

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
