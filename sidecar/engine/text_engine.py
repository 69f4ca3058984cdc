"""A loaded text model: refuses jobs too long or too large, has the others computed."""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from sidecar.config.settings import EngineConfig
from sidecar.core.conversation import unknown
from sidecar.core.errors import (
    BadRequest,
    ContextLengthExceeded,
    InsufficientMemory,
    SidecarError,
)
from sidecar.core.prompt import ModelPrompt, behind_images
from sidecar.core.requests import GenerationOptions
from sidecar.engine.adapter_leases import AdapterLeases
from sidecar.engine.constrained_row import Constraint
from sidecar.engine.gpu_scheduler import Worker
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.grammar_compiler import GrammarCompiler
from sidecar.engine.job import Forecast, Job, JobSpec
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.process_memory import NOTHING, AdmittedJob, Demand
from sidecar.engine.sampling import Sampling
from sidecar.engine.scheduler import BatchScheduler
from sidecar.engine.source_maker import SourceMaker, Texts
from sidecar.engine.speculation.lookup_drafter import Sources
from sidecar.engine.speculation.source_forms import encoded_pieces
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.window_layers import SMALLEST_WINDOW
from sidecar.output.splitter_check import splitter_faults

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_BY_DEFAULT = 32768  # when neither the request nor the user says
_MAX_WINDOWS = 16  # of a prompt whose context rotates: it is computed all the same


@dataclass(eq=False)
class _WorkBeside:
    """A computation that is no generation, as Admission counts it."""

    due: Demand = NOTHING


class TextEngine:
    """One loaded text model and its batch loop. Safe from any thread."""

    def __init__(
        self,
        model: LoadedModel,
        loop: BatchScheduler,
        store: PrefixStore,
        gpu: GpuThread,
        config: EngineConfig,
    ) -> None:
        self.model = model
        self.grammars = GrammarCompiler(
            model.tokenizer, model.vocab_size, model.stop_ids
        )
        self.store = store
        self.guard = loop.guard
        self.selftest: dict[str, str] = {}
        self.max_context = min(model.context_len, config.max_kv_size)
        self._loop = loop
        self._admission = loop.admission
        self._gpu = gpu
        self._config = config
        self.is_closed = False
        self._forbidden: set[str] = set()
        self._workers: list[Worker] = []
        self._source_maker = SourceMaker()
        self.adapters = AdapterLeases(
            model, gpu, loop.guard.process, lambda: loop.adapters
        )
        process = loop.guard.process
        self._end_idle = process.watch_idle(self.adapters.let_go_idle)
        self.work_between(loop)

    @property
    def fitting_context(self) -> int:
        """Most tokens of prompt and answer that fit into memory now."""
        return self.guard.largest_context(self.max_context, self._admission.reserved)

    def longest_prompt(self, options: GenerationOptions) -> int:
        """Most tokens that are read of a request's prompt."""
        if self.window(options) is None:
            return self.max_context - 1  # there must be room for an answer
        return self.max_context * _MAX_WINDOWS

    def window(self, options: GenerationOptions) -> int | None:
        """
        How many tokens a request's context keeps when it rotates; None: it does not.

        Raises:
            BadRequest: it asks for more than the model has, or KV is quantised.
        """
        asked, maximum = options.context_len, self.max_context
        if asked is not None and not SMALLEST_WINDOW <= asked <= maximum:
            raise BadRequest(
                f"context_len must be {SMALLEST_WINDOW}..{maximum}, got {asked}",
                param="context_len",
            )
        if asked is not None and self.model.quantization is not None:
            raise BadRequest(
                "context_len must be left out: KV is quantised here (KV_BITS), and a "
                "window of such KV cannot rotate",
                param="context_len",
            )
        is_rotating = self._config.context_overflow == "rotate"
        return asked or (maximum if is_rotating else None)

    def windowed(self, prompt: ModelPrompt, options: GenerationOptions) -> ModelPrompt:
        """The same, with the window that its context keeps if it is longer."""
        window = self.window(options)
        if window is None or prompt.images or len(prompt.ids) <= window:
            return prompt
        return replace(prompt, window=window)

    def forecast(
        self,
        lengths: tuple[int, int],
        max_tokens: int | None,
        window: int | None = None,
    ) -> Forecast:
        """
        Look ahead for a prompt of so many tokens, of which so many are stored.

        Args:
            window: tokens that its context keeps; None: all.
        """
        (total, cached), pacer = lengths, self._loop.pacer
        largest = self.fitting_context
        num_before = self._loop.prefills.num_ahead + total - cached
        ttft_s = num_before * pacer.rate.seconds + pacer.decode_step_s
        held = total if window is None else min(total, window - 1)
        num_new = min(max_tokens or 256, max(1, largest - held))
        return Forecast(
            prompt_tokens=total,
            cached_tokens=cached,
            predicted_ttft_s=round(ttft_s, 4),
            predicted_s=round(ttft_s + num_new * pacer.decode_step_s, 4),
            fits=held < largest,
            max_context_tokens=largest,
            queued=self._admission.num_open,
        )

    @property
    def token_s(self) -> float:
        """Seconds to compute a token of a prompt, as measured."""
        return self._loop.pacer.rate.seconds

    @property
    def max_jobs(self) -> int:
        """Jobs that may be submitted and not released, of all models."""
        return self._admission.max_jobs

    def submit(
        self,
        prompt: ModelPrompt,
        sampling: Sampling,
        options: GenerationOptions,
        constraint: Constraint | None = None,
        further: Texts = list,
    ) -> Job:
        """
        Admit a generation; whoever gets the job must `release` it.

        Args:
            constraint: what each answer must keep to.
            further: makes ids of texts beside the prompt that an answer may repeat,
                piece by piece; asked on a thread of its own, where it may be drafted.
        Raises:
            ContextLengthExceeded: the prompt leaves no room for an answer.
            Busy: the queue is full.
            InsufficientMemory: it does not fit beside what was admitted before.
            Unavailable: the server is going down.
        """
        spec = self._admit(prompt, sampling, options)
        sources = None
        if self.drafts(prompt, spec.n):
            sources = Sources(vocab_size=self.model.vocab_size)
        job = Job(replace(spec, constraint=constraint, sources=sources))
        length, num_copies = job.spec.num_kept, job.spec.n
        if len(job.spec.model_ids) > length:
            num_copies += 1  # a window, and what is kept of it from before it rotates

        images = self._images(job.spec.prompt)

        def demand(others: Demand) -> Demand:
            # A full window is as long as the context, and needs no room behind it.
            longest = max(self.max_context, length + 1)
            return self.guard.demand(length, num_copies, longest, others, images)

        self._take_in(job, demand)
        if sources is not None:
            self._source_maker.add(job, further, lambda: self._predicted(options))
        self._gpu.post(lambda: self._loop.prefills.add(job))
        return job

    def run_on_gpu(self, function: Callable[[], T]) -> T:
        """Run a function on the GPU thread, as one turn."""
        return self._gpu.call(function)

    def run_beside(
        self,
        steps: Generator[None, None, T],
        num_tokens: int,
        *,
        is_for_idle: bool = False,
        paused_by: Callable[[], SidecarError] | None = None,
        check: Callable[[], None] | None = None,
    ) -> T:
        """
        Have a computation done between the requests' turns, admitted like one of them.

        Args:
            num_tokens: of the longest prompt that it computes at once.
            is_for_idle: whether it goes on only while nothing else is computed.
            paused_by: with what requests are refused meanwhile; None: they are not.
            check: asked while it waits for its turn; what it raises ends it.
        Returns:
            What the steps return; what they raise is raised.
        Raises:
            Busy, InsufficientMemory, Unavailable: as for a generation.
        """
        work = _WorkBeside()
        self._take_in(
            work,
            lambda others: self.guard.demand(num_tokens, 1, self.max_context, others),
        )
        pause = self._admission.paused(paused_by) if paused_by else nullcontext()
        try:
            with pause:
                return self._gpu.call_in_steps(
                    steps,
                    is_background=is_for_idle,
                    is_for_idle=is_for_idle,
                    check=check,
                )
        finally:
            self._admission.release(work)

    def _take_in(self, job: AdmittedJob, demand: Callable[[Demand], Demand]) -> None:
        """Admit it; nobody is refused by numbers of before, or for what is idle."""
        try:
            self._admission.admit(job, demand)
            return
        except InsufficientMemory:
            self.guard.process.count_anew(self._gpu)
        self._admission.admit(job, demand)

    def drafts(self, prompt: ModelPrompt, n: int) -> bool:
        """Whether the answers to a prompt may be drafted."""
        is_wanted = self._config.speculation != "off" and self.is_allowed("verify")
        return is_wanted and n == 1 and not prompt.images

    def _predicted(self, options: GenerationOptions) -> Iterable[list[int]]:
        """Ids of what its client expects, as much as an answer may repeat."""
        if not options.prediction:
            return []
        return encoded_pieces([options.prediction], self.encode)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as a model writes it."""
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def look_s(self, prompt: ModelPrompt) -> float:
        """Seconds that its images will take that are still to be looked at."""
        tower = self.guard.tower
        return tower.id_s * sum(self._unseen(prompt)) if tower else 0.0

    def _images(self, prompt: ModelPrompt) -> Demand:
        """What its images take beyond a text of that length."""
        found, vision_encoder = (
            self.guard.images(self._unseen(prompt)),
            self.model.vision_encoder,
        )
        if vision_encoder is None or vision_encoder.is_causal:
            return found
        last = behind_images(prompt.ids)
        if self.store.match_len(prompt.ids, prompt.salt) >= last:
            return found
        return found + Demand(0, self.guard.model.peak_bytes(last, last))

    def _unseen(self, prompt: ModelPrompt) -> list[int]:
        """Numbers of ids of the images behind what is stored, without features."""
        if not prompt.images or self.model.vision_encoder is None:
            return []
        held, memo = (
            self.store.match_len(prompt.ids, prompt.salt),
            self.model.vision_encoder.memo,
        )
        return [
            placed.end - placed.start
            for placed in prompt.images
            if placed.end > held and not memo.has(placed.image, prompt.salt)
        ]

    def release(self, job: Job) -> None:
        """Give the job's place back; it is cancelled if it still runs."""
        job.cancel()
        self._source_maker.drop(job)
        self._admission.release(job)

    def clear(self) -> int:
        """Forget the stored KV; the bytes that came back."""
        return self._gpu.call(self.store.forget)

    def is_allowed(self, name: str) -> bool:
        """Whether a way is used: no test of it failed or is still to come."""
        return name not in self._forbidden

    def allow(self, name: str, *, is_allowed: bool) -> None:
        """Use a way of reuse from now on, or do without it."""
        (self._forbidden.discard if is_allowed else self._forbidden.add)(name)
        if name == "batch":
            self._loop.may_batch(is_allowed)
        elif name == "verify":
            self._loop.may_speculate(is_allowed)
        elif name == "ahead":
            self._loop.may_go_ahead(is_allowed)
        else:
            off = self.store.switched_off
            (off.discard if is_allowed else off.add)(name)

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs; GPU thread only."""
        return not self._loop.has_work()

    def work_between(self, worker: Worker, *, begins_in_s: float = 0.0) -> None:
        """
        Have work of this model's done on the GPU thread until it is closed.

        Args:
            begins_in_s: when a worker that has none yet is to be asked again.
        """
        self._workers.append(worker)
        self._gpu.add_worker(worker)
        if begins_in_s:
            self._gpu.wake_in(begins_in_s)

    def check_splitter(self) -> None:
        """Try how this model's answers are cut; a warning says what goes wrong."""
        faults = splitter_faults(self.model.syntax)
        self.selftest["splitter"] = "failed" if faults else "ok"
        for fault in faults:
            logger.error(
                "splitter of family %s: %s", self.model.syntax.family.name, fault
            )

    @property
    def failed_tests(self) -> tuple[str, ...]:
        """Names of the tests that this model failed."""
        found = self.outcomes.items()
        return tuple(name for name, outcome in found if outcome == "failed")

    @property
    def outcomes(self) -> dict[str, str]:
        """How its tests went; what failed while it was used counts, too."""
        found = self.selftest.copy()
        if self._loop.has_failed_ahead:
            found["ahead"] = "failed"
        return found

    def close(self) -> int:
        """Take no turns any more and let the weights go; the bytes. Repeatable."""
        self.is_closed = True
        self._end_idle()
        self._source_maker.close()
        while self._workers:
            self._gpu.remove_worker(self._workers.pop())
        self._loop.close()
        return self._gpu.call(self._let_go)

    def _let_go(self) -> int:
        self.store.budget.released.let_go()
        return self.model.release()

    def _admit(
        self, prompt: ModelPrompt, sampling: Sampling, options: GenerationOptions
    ) -> JobSpec:
        ids = prompt.ids
        if prompt.conversation is None:
            conversation = unknown(self.store.generation)
            prompt = replace(prompt, conversation=conversation)
        if not ids:
            raise BadRequest("the prompt is empty", param="messages")
        window = None if prompt.images else self.window(options)
        longest = self.max_context - 1
        if window is not None:
            longest = self.longest_prompt(options)
        if len(ids) > longest:
            maximum = longest if window is not None else self.max_context
            raise ContextLengthExceeded(
                f"this model's maximum context length is {maximum} tokens, "
                f"and the prompt has {len(ids)}",
                num_tokens=len(ids),
            )
        maximum = self._config.batch_max_size if self._config.enable_batching else 1
        maximum = min(maximum, self._config.max_concurrent)
        if options.n > maximum:
            raise BadRequest(f"n must be 1..{maximum}, got {options.n}", param="n")
        self._check_ids(prompt.read_ids, options)
        if options.context_len and prompt.images:
            raise BadRequest(
                "context_len must be left out: a context with images cannot rotate",
                param="context_len",
            )
        max_tokens = self._max_tokens(len(ids), options, window)
        if window is not None and len(ids) + max_tokens <= window + 1:
            window = None  # the last token is fed to nobody
        return JobSpec(
            prompt,
            sampling,
            max_tokens,
            options.stop,
            options.n,
            options.top_logprobs,
            window=window,
        )

    def _max_tokens(
        self, length: int, options: GenerationOptions, window: int | None
    ) -> int:
        """Of the answer; where nobody says, no more than the context keeps."""
        asked = options.max_tokens
        wanted = asked or self._config.default_max_tokens or _MAX_BY_DEFAULT
        if window is None:
            return min(wanted, self.max_context - length)
        if asked is not None:
            return asked
        return min(wanted, window)

    def _check_ids(self, ids: Sequence[int], options: GenerationOptions) -> None:
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
