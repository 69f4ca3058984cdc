"""A text model that can be asked: admission, jobs, numbers."""

import logging
import threading

from sidecar.config.settings import EngineConfig
from sidecar.core.errors import (
    BadRequest,
    Busy,
    ContextLengthExceeded,
    InsufficientMemory,
    Unavailable,
)
from sidecar.core.prompt import ModelIds, PreparedPrompt
from sidecar.core.requests import GenerationOptions
from sidecar.engine.batch_loop import BatchLoop
from sidecar.engine.expiry import Expiry
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.job import NOTHING, Demand, Job, JobSpec
from sidecar.engine.loader import LoadedModel
from sidecar.engine.sampling import Sampling
from sidecar.engine.self_test import PathResult, Proof, SelfTest
from sidecar.kv.prefix_store import PrefixStore
from sidecar.output.splitter_check import splitter_faults

logger = logging.getLogger(__name__)

_MOST_BY_DEFAULT = 32768  # when neither the request nor the user says


class TextEngine:
    """One loaded text model and its batch loop. Safe from any thread."""

    def __init__(
        self,
        model: LoadedModel,
        loop: BatchLoop,
        store: PrefixStore,
        gpu: GpuThread,
        config: EngineConfig,
    ) -> None:
        self.model = model
        self.store = store
        self.guard = loop.guard
        self.selftest: dict[str, str] = {}
        self.max_context = min(model.context_len, config.max_kv_size)
        self._loop = loop
        self._gpu = gpu
        self._config = config
        self._lock = threading.Lock()
        self._open: set[Job] = set()
        self._is_draining = False
        self._proof: Proof | None = None
        gpu.add_worker(loop)
        self._expiry = Expiry(store, gpu)

    @property
    def fitting_context(self) -> int:
        """Most tokens of prompt and answer that fit into memory now."""
        with self._lock:
            others = self._promised()
        return self.guard.largest_context(self.max_context, others)

    def predict_ttft(self, num_prefill: int) -> float:
        """Seconds to the first token of a prompt with that many tokens to compute."""
        pacer = self._loop.pacer
        num_before = self._loop.prefills.num_ahead
        return (num_before + num_prefill) * pacer.rate.seconds + pacer.decode_step_s

    @property
    def decode_step_s(self) -> float:
        """Seconds of a decode step, as measured last."""
        return self._loop.pacer.decode_step_s

    @property
    def num_open(self) -> int:
        """Jobs submitted and not released."""
        with self._lock:
            return len(self._open)

    def submit(
        self,
        prompt: PreparedPrompt,
        sampling: Sampling,
        options: GenerationOptions,
    ) -> Job:
        """
        Admit a generation; whoever gets the job must `release` it.

        Args:
            prompt: of a chat, or of a raw completion, which has less to say.

        Raises:
            ContextLengthExceeded: the prompt leaves no room for an answer.
            Busy: the queue is full.
            InsufficientMemory: it does not fit beside what was admitted before.
            Unavailable: the server is going down.
        """
        job = Job(self._admit(prompt, sampling, options))
        with self._lock:
            if self._is_draining:
                raise Unavailable("the server is shutting down", retry_after_s=5)
            limit = self._config.max_concurrent + self._config.max_queued
            if len(self._open) >= limit:
                raise Busy(f"all {limit} places are taken", retry_after_s=2)
            self._reserve(job)
            self._open.add(job)
        self._gpu.post(lambda: self._loop.prefills.add(job))
        return job

    def release(self, job: Job) -> None:
        """Give the job's place back; it is cancelled if it still runs."""
        job.cancel()
        with self._lock:
            self._open.discard(job)

    def drain(self) -> None:
        """Take no new jobs."""
        with self._lock:
            self._is_draining = True

    def clear_cache(self) -> None:
        """Forget the stored KV."""
        self._gpu.call(self.store.clear)

    def prove(self, test: SelfTest, load_s: float) -> None:
        """
        Use each way of reuse from when its test has passed on; GPU thread only.

        Args:
            load_s: the tests begun within that time are waited for; the others run
                between requests.
        """
        for name in test.pending:
            self._allow(name, is_allowed=False)
            self.selftest[name] = "pending"
        self._proof = Proof(test, self._take_result, lambda: not self._loop.has_work())
        self._proof.run_for(load_s)
        if test.pending:
            logger.warning(
                "selftest goes on between requests, these are not used until then: %s",
                ", ".join(test.pending),
            )
        self._gpu.add_worker(self._proof)

    def check_splitter(self) -> None:
        """Try how this model's answers are cut; told is what goes wrong."""
        faults = splitter_faults(self.model.syntax)
        self.selftest["splitter"] = "failed" if faults else "ok"
        for fault in faults:
            logger.error(
                "splitter of family %s: %s", self.model.syntax.family.name, fault
            )

    @property
    def failed_tests(self) -> tuple[str, ...]:
        """Names of the tests at load that this model failed."""
        found = self.selftest.copy()
        return tuple(name for name, outcome in found.items() if outcome == "failed")

    def close(self) -> None:
        """Stop taking turns and forget the KV."""
        self._expiry.close()
        if self._proof:
            self._gpu.remove_worker(self._proof)
        self._gpu.remove_worker(self._loop)
        self.clear_cache()

    def _take_result(self, result: PathResult) -> None:
        self.selftest[result.name] = result.outcome
        self._allow(result.name, is_allowed=result.outcome == "ok")

    def _allow(self, name: str, *, is_allowed: bool) -> None:
        if name == "batch":
            self._loop.may_batch(is_allowed)
        elif is_allowed:
            self.store.switch_on(name)
        else:
            self.store.switch_off(name)

    def _admit(
        self, prompt: PreparedPrompt, sampling: Sampling, options: GenerationOptions
    ) -> JobSpec:
        ids = prompt.model_ids
        if not ids:
            raise BadRequest("the prompt is empty", param="messages")
        room = self.max_context - len(ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_context} tokens, "
                f"and the prompt has {len(ids)}",
                num_tokens=len(ids),
            )
        most = self._config.batch_max_size if self._config.enable_batching else 1
        most = min(most, self._config.max_concurrent)
        if options.n > most:
            raise BadRequest(f"n must be 1..{most}, got {options.n}", param="n")
        self._check_ids(ids, options)
        wanted = (
            options.max_tokens or self._config.default_max_tokens or _MOST_BY_DEFAULT
        )
        max_tokens = min(wanted, room)
        return JobSpec(
            ids, sampling, max_tokens, options.stop, options.n, options.top_logprobs,
            prompt.boundaries, prompt.session, prompt.is_guest, prompt.own_len,
            prompt.salt,
        )  # fmt: skip

    def _reserve(self, job: Job) -> None:
        """Refuse before the allocation what cannot fit after it; holds the lock."""
        length, num_copies = len(job.spec.model_ids), job.spec.n
        others = self._promised()
        if length >= self.guard.largest_context(self.max_context, others, num_copies):
            why = self.guard.refusal(length, num_copies, self.max_context, others)
            raise InsufficientMemory(why, param="messages", retry_after_s=5)
        job.due = self.guard.model.demand(length, num_copies)

    def _promised(self) -> Demand:
        """What the jobs admitted before will still allocate."""
        return sum((job.due for job in self._open), NOTHING)

    def _check_ids(self, ids: ModelIds, options: GenerationOptions) -> None:
        """Ids the model has no row for would be read out of bounds."""
        size = self.model.vocab_size
        if not all(0 <= i < size for i in ids):
            raise BadRequest(f"token ids must be 0..{size - 1}", param="prompt")
        for token, _ in options.sampling.logit_bias:
            if not 0 <= token < size:
                raise BadRequest(
                    f"logit_bias keys must be token ids 0..{size - 1}, got {token}",
                    param="logit_bias",
                )
