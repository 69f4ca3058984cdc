"""
One request, from what was decided to what came of it: Plan -> Run -> Receipt.

A plan is made before anything is computed: whatever can be refused has been refused. A
run is a plan that the engine has taken; its reader gets events. A receipt is made once,
when it ends in whatever way, and goes to whoever keeps something of it.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sidecar.core.errors import RequestCancelled, RequestTimeout, SidecarError
from sidecar.core.events import (
    CallMetrics,
    Event,
    Finished,
    Idle,
    PrefillProgress,
    ReasoningDelta,
    TextDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from sidecar.core.prompt import ModelPrompt
from sidecar.core.requests import (
    ChatRequest,
    CompletionRequest,
    OutputFormat,
    Tool,
    ToolCall,
    join_names,
)
from sidecar.engine.constrained_row import Constraint
from sidecar.engine.job import ChoiceEnded, Forecast, Job, JobFailed, Prefilled, Token
from sidecar.engine.process_memory import ProcessMemory
from sidecar.engine.sampling import Sampling
from sidecar.engine.speculation.row_speculation import DraftCount, DrafterName
from sidecar.infra.metrics import Metrics
from sidecar.memory.conversation_memory import AssistantOutput
from sidecar.memory.healing_store import visible_hash
from sidecar.pipeline.prepare import Pipeline, PreparedPrompt
from sidecar.service.choice import Choice
from sidecar.service.run_view import RunView

logger = logging.getLogger(__name__)

IGNORED = "x-litellm-mlx-ignored"
_TICK_S = 0.1  # how soon a vanished client or a passed deadline is noticed
_OUTCOMES: dict[type[SidecarError], str] = {
    RequestCancelled: "cancelled",
    RequestTimeout: "timeout",
}
_BROKEN_OFF = (*_OUTCOMES.values(), "client_gone")


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """
    A request that will be run: a raw completion, of which nothing is remembered.

    Args:
        prompt: what the model reads. sampling: settled.
        timeout_s: from the admission to the last token.
        constraint: what each answer is held to; None: nothing.
    """

    request: ChatRequest | CompletionRequest
    prompt: ModelPrompt
    sampling: Sampling
    timeout_s: float
    constraint: Constraint | None

    @property
    def headers(self) -> dict[str, str]:
        """What a client may want to know before the first token."""
        return _named(self.ignored)

    @property
    def ignored(self) -> tuple[str, ...]:
        """What was asked for and has no effect: fields, images that are not seen."""
        return self.request.ignored

    @property
    def usage(self) -> Usage:
        """What is known before the first token: the prompt, what of it is reused."""
        return Usage(len(self.prompt.ids), 0, 0, 0)

    @property
    def begun_text(self) -> str:
        """What its client began each answer with."""
        return ""

    @property
    def predicted_ttft_s(self) -> float | None:
        """Seconds to the first token, as forecast; None: nobody has."""
        return None


@dataclass(frozen=True, slots=True)
class ChatPlan(PlannedRun):
    """
    A chat that will be run, and all that was found out about it.

    Args:
        prepared: how its prompt was made. forecast: what it will cost.
        unheld: the fields that ask for a form which its answer is not held to.
        held_tools: as the grammar of its calls knows them; none: they are free.
        checked: the schema that its text is checked against; None: none.
    """

    request: ChatRequest
    prepared: PreparedPrompt
    forecast: Forecast
    unheld: tuple[str, ...] = ()
    held_tools: tuple[Tool, ...] = ()
    checked: OutputFormat | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What a client may want to know before the first token."""
        report = self.prepared.report
        return {
            "x-mlx-prompt-tokens": str(len(self.prompt.ids)),
            "x-mlx-cached-tokens": str(report.reused_len),
            "x-mlx-pinned": ",".join(report.pinned),
            "x-mlx-predicted-ttft-s": str(self.forecast.predicted_ttft_s),
            **_named(self.ignored),
        }

    @property
    def ignored(self) -> tuple[str, ...]:
        """What was asked for and has no effect: fields, images that are not seen."""
        named = *self.request.ignored, *self.unheld
        return (*named, *self.prepared.unseen)

    @property
    def usage(self) -> Usage:
        """What is known before the first token: the prompt, what of it is reused."""
        return Usage(len(self.prompt.ids), 0, self.prepared.report.reused_len, 0)

    @property
    def begun_text(self) -> str:
        """What its client began each answer with."""
        return self.request.begun_text

    @property
    def predicted_ttft_s(self) -> float | None:
        """Seconds to the first token, as forecast."""
        return self.forecast.predicted_ttft_s


def _named(ignored: Sequence[str]) -> dict[str, str]:
    return {IGNORED: join_names(ignored)} if ignored else {}


@dataclass(frozen=True, slots=True)
class Receipt:
    """
    How a request ended.

    Args:
        outcome: `finished`; `cancelled`, `timeout`, `client_gone`: broken off; else the
            code of an error.
        said: what the client was sent as its first choice.
        is_spoiled: the watchdog ended it: nothing of it may be remembered.
        ttft_s: seconds to the first token; None: there was none. seconds: in all.
        waited_s: until its prompt's turn came.
        drafts: what was drafted, by drafter.
        num_computed: tokens of the prompt and the answer that were not reused.
        longest: tokens of the longest choice.
    """

    outcome: str
    usage: Usage
    said: AssistantOutput
    is_spoiled: bool
    ttft_s: float | None
    seconds: float
    waited_s: float
    drafts: Mapping[DrafterName, DraftCount]
    num_computed: int
    longest: int

    def metrics(self, process: ProcessMemory) -> CallMetrics:
        """What it took, and the memory that was in use at its end."""
        usage, ttft_s = self.usage, self.ttft_s or self.seconds
        prefill_s, decode_s = ttft_s - self.waited_s, self.seconds - ttft_s
        num_new = usage.prompt_tokens - usage.cached_tokens
        num_later = max(usage.completion_tokens - 1, 0)
        return CallMetrics(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            round(prefill_s, 6),
            round(decode_s, 6),
            round(self.seconds, 6),
            round(num_new / prefill_s, 1) if prefill_s > 0 else 0.0,
            round(num_later / decode_s, 1) if decode_s > 0 else 0.0,
            process.peak_bytes,
            process.active_bytes,
        )

    @property
    def is_whole(self) -> bool:
        """Whether it ended cleanly, and may be remembered."""
        return self.outcome == "finished" and not self.is_spoiled

    @property
    def numbers(self) -> dict[str, Any]:
        """For a log."""
        usage, ttft_s = self.usage, self.ttft_s
        return {
            "outcome": self.outcome,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "ttft_s": None if ttft_s is None else round(ttft_s, 4),
            "waited_s": round(self.waited_s, 4),
            "seconds": round(self.seconds, 4),
        }

    @property
    def is_broken_off(self) -> bool:
        """Whether it may be asked again."""
        return self.outcome in _BROKEN_OFF


class Run:
    """
    A plan on its way. Read on one thread; `cancel` may come from any.

    Whoever holds it must `close` it, whatever happened.

    Args:
        settle: takes the receipt; before the reader learns that all is finished.
        resources: what is freed at the close.
        process: whose memory its metrics tell.
    """

    def __init__(
        self,
        plan: PlannedRun,
        job: Job,
        choices: Sequence[Choice],
        settle: Callable[[Receipt], None],
        resources: contextlib.ExitStack,
        process: ProcessMemory,
    ) -> None:
        self.plan = plan
        self._process = process
        self._job = job
        self._choices = choices
        self._settle = settle
        self._resources = resources
        self._deadline = time.monotonic() + plan.timeout_s
        self._stopped_by: SidecarError | None = None
        self._progress = _Progress(plan.begun_text)
        self._receipt: Receipt | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """What its client may want to know before the first token."""
        return self.plan.headers

    @property
    def usage(self) -> Usage:
        """What is known of it before the first token."""
        return self.plan.usage

    @property
    def max_tokens(self) -> int:
        """Most tokens of each choice, as cut to the context."""
        return self._job.spec.max_tokens

    def view(self) -> RunView:
        """How far it is; any thread."""
        plan, job, progress = self.plan, self._job, self._progress
        now, first_at = time.monotonic(), progress.first_token_at
        num_output = progress.num_output
        has_begun = job.began_at is not None or progress.num_done
        state = "decode" if first_at else "prefill" if has_begun else "queued"
        decode_s = now - first_at if first_at else 0.0
        return RunView(
            job.number,
            plan.request.request_id,
            plan.request.client.user_agent,
            plan.request.model,
            plan.prompt.session,
            state,
            len(plan.prompt.ids),
            len(plan.prompt.ids) if first_at else progress.num_done,
            progress.num_cached or plan.usage.cached_tokens,
            num_output,
            round(now - job.submitted, 3),
            plan.predicted_ttft_s,
            round(first_at - job.submitted, 3) if first_at else None,
            round((num_output - 1) / decode_s, 1) if decode_s > 0 else 0.0,
        )

    def cancel(self, why: SidecarError | None = None) -> None:
        """Stop it; its reader gets this error, else RequestCancelled."""
        self._stopped_by = why or RequestCancelled("the request was cancelled")
        self._job.cancel()

    def events(self) -> Iterator[Event]:
        """
        Events as they come; Idle when there is nothing to tell; Finished last.

        Raises:
            RequestCancelled, RequestTimeout: it was stopped.
            SidecarError: the engine failed.
        """
        try:
            yield from self._events()
        except SidecarError as error:
            kind = RequestCancelled if error is self._stopped_by else type(error)
            self._end(_OUTCOMES.get(kind, error.code))
            raise
        except Exception:
            self._end("internal_error")
            raise
        usage = self._end("finished")
        metrics = self._receipt.metrics(self._process) if self._receipt else None
        is_asked = self.plan.request.options.wants_metrics
        yield Finished(usage, metrics if is_asked else None)

    def close(self) -> None:
        """Free the engine, the lease and the place in the queue; idempotent."""
        self._resources.close()
        self._end("client_gone")

    def _events(self) -> Iterator[Event]:
        open_choices = len(self._choices)
        while open_choices:
            self._check_stopped()
            event = self._job.next_event(_TICK_S)
            if isinstance(event, JobFailed):
                raise event.error
            if isinstance(event, (Token, ChoiceEnded)):
                open_choices -= isinstance(event, ChoiceEnded)
                self._progress.note(event)
                events = self._tell(event)
                self._progress.show(events)
                yield from events or (Idle(),)  # held text must not look like a stall
            else:
                self._progress.note(event)
                yield self._prefill_progress(event) or Idle()

    def _prefill_progress(self, event: Prefilled | None) -> PrefillProgress | None:
        if event is None or not self.plan.request.options.wants_progress:
            return None
        return self._progress.of_prefill(event)

    def _tell(self, event: Token | ChoiceEnded) -> list[Event]:
        choice = self._choices[event.choice]
        return choice.feed(event) if isinstance(event, Token) else choice.end(event)

    def _check_stopped(self) -> None:
        if self._stopped_by is not None:
            raise self._stopped_by
        if time.monotonic() > self._deadline:
            raise RequestTimeout(f"no answer within {self.plan.timeout_s:g} seconds")

    def _end(self, outcome: str) -> Usage:
        """Make the receipt, the first time; what the request has cost."""
        usage = self._progress.usage(self.plan, self._choices, self._job)
        if self._receipt is None:
            is_all_shown = self._choices[0].is_all_shown
            self._receipt = self._progress.receipt(
                self._job, outcome, usage, is_all_shown=is_all_shown
            )
            self._settle(self._receipt)
        return usage


@dataclass(slots=True)
class _Shown:
    """
    What the client was sent of one choice.

    Args:
        is_calling: of a call that has not ended, too: how a client echoes that, nobody
            knows. started: ids of all calls that were begun.
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    is_calling: bool = False
    started: list[str] = field(default_factory=list)

    @property
    def visible(self) -> str | None:
        """By what a client's echo of it is known."""
        return visible_hash("".join(self.text), self.calls)

    def said(
        self,
        sampled: tuple[int, ...],
        others: tuple[str, ...],
        started: Sequence[str],
    ) -> AssistantOutput:
        """
        It, with the ids that may be put back, and how the others look.

        Args:
            started: ids of all choices' calls.
        """
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        calls = tuple(self.calls)
        return AssistantOutput(text, reasoning, calls, sampled, others, tuple(started))


class _Progress:
    """
    What has come of a run so far.

    Args:
        begun: the beginning of each answer, which its client has already.
    """

    def __init__(self, begun: str) -> None:
        self.num_cached = self.num_done = 0  # tokens of the prompt
        self._num_sampled: dict[int, int] = {}  # by choice
        self.first_token_at: float | None = None
        self._shown: dict[int, _Shown] = defaultdict(lambda: _Shown([begun]))
        self._sampled: tuple[int, ...] = ()
        self._is_spoiled = False
        self._prefilled_from: float | None = None

    @property
    def num_output(self) -> int:
        """Tokens that were sampled, of all choices."""
        return sum(tuple(self._num_sampled.values()))

    def of_prefill(self, event: Prefilled) -> PrefillProgress:
        """How far it is; what is left takes as long, token for token."""
        now = time.monotonic()
        seconds = now - (self._prefilled_from or now)
        num_done = event.done - event.cached
        num_left = event.total - event.done
        left = seconds * num_left / num_done if num_done else None
        return PrefillProgress(event.done, event.total, event.cached, seconds, left)

    def note(self, event: Prefilled | Token | ChoiceEnded | None) -> None:
        """Count what the engine did."""
        if isinstance(event, Prefilled):
            self.num_cached, self.num_done = event.cached, event.done
            self._prefilled_from = self._prefilled_from or time.monotonic()
        elif isinstance(event, Token):
            # The end corrects it; who is cancelled before has had these.
            sampled = self._num_sampled.get(event.choice, 0)
            self._num_sampled[event.choice] = sampled + 1
            self.first_token_at = self.first_token_at or time.monotonic()
        elif isinstance(event, ChoiceEnded):
            self._num_sampled[event.choice] = len(event.token_ids)
            self._is_spoiled = self._is_spoiled or event.is_aborted
            # A turn cut at a stop string holds text nobody was shown.
            if event.choice == 0 and event.stop_string is None:
                self._sampled = event.token_ids

    def show(self, events: Sequence[Event]) -> None:
        """Note what the client is sent."""
        for event in events:
            if isinstance(event, TextDelta):
                self._shown[event.choice].text.append(event.text)
            elif isinstance(event, ReasoningDelta):
                self._shown[event.choice].reasoning.append(event.text)
            elif isinstance(event, ToolCallStarted):
                self._shown[event.choice].is_calling = True
                self._shown[event.choice].started.append(event.id)
            elif isinstance(event, ToolCallEnded):
                self._shown[event.choice].is_calling = event.is_broken
                if not event.is_broken:
                    self._shown[event.choice].calls.append(event.call)

    def usage(self, plan: PlannedRun, choices: Sequence[Choice], job: Job) -> Usage:
        """Tokens until now."""
        drafted = sum(each.drafted for each in job.draft_counts.values())
        accepted = sum(each.accepted for each in job.draft_counts.values())
        return Usage(
            prompt_tokens=len(plan.prompt.ids),
            completion_tokens=self.num_output,
            cached_tokens=self.num_cached,
            reasoning_tokens=sum(choice.num_reasoning for choice in choices),
            accepted_tokens=accepted,
            rejected_tokens=drafted - accepted,
            num_rotated=int(job.has_rotated),
        )

    def receipt(
        self, job: Job, outcome: str, usage: Usage, *, is_all_shown: bool
    ) -> Receipt:
        """
        How it ended.

        Args:
            is_all_shown: whether its client was sent all of the first choice.
        """
        first, *others = [self._shown[n] for n in sorted({0, *self._shown})]
        # Of two choices that look alike nobody can tell which one is gone on from.
        looks = tuple(other.visible for other in others if other.visible)
        is_echoed = is_all_shown and not first.is_calling
        is_alone = first.visible not in looks and is_echoed
        started = [i for one in self._shown.values() for i in one.started]
        said = first.said(self._sampled if is_alone else (), looks, started)
        began = self.first_token_at
        ttft_s = None if began is None else began - job.submitted
        seconds = time.monotonic() - job.submitted
        waited_s = (job.began_at or job.submitted) - job.submitted
        return Receipt(
            outcome,
            usage,
            said,
            self._is_spoiled,
            ttft_s,
            seconds,
            waited_s,
            job.draft_counts,
            max(self.num_done - self.num_cached, 0) + usage.completion_tokens,
            max(self._num_sampled.values(), default=0),
        )


def remember(pipeline: Pipeline, prepared: PreparedPrompt, receipt: Receipt) -> None:
    """What becomes of a chat's end: only what a client was shown is remembered."""
    memory, pending_turn = pipeline.memory, prepared.pending_turn
    if receipt.is_whole:
        memory.commit(pending_turn, receipt.said)
    else:
        memory.note_unkept(pending_turn, receipt.said)
        if receipt.is_spoiled:
            pipeline.counters.add("watchdog_abort")
        elif receipt.is_broken_off:
            memory.keep_past(pending_turn)
    usage = receipt.usage
    pipeline.note_cost(prepared, usage.prompt_tokens - usage.cached_tokens)


def count(receipt: Receipt, metrics: Metrics) -> None:
    """Tell the metrics and the log how a request ended."""
    usage, ttft_s = receipt.usage, receipt.ttft_s
    metrics.jobs_ended.labels(receipt.outcome).inc()
    if ttft_s is not None:
        metrics.ttft.observe(ttft_s)
        metrics.queue.observe(receipt.waited_s)
    metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
    metrics.tokens.labels("cached").inc(usage.cached_tokens)
    metrics.tokens.labels("generated").inc(usage.completion_tokens)
    for drafter, drafts in receipt.drafts.items():
        for name, number in asdict(drafts).items():
            metrics.drafts[name].labels(drafter).inc(number)
    decode_s = max(receipt.seconds - (ttft_s or 0.0), 1e-9)
    if ttft_s is not None and receipt.longest > 1:
        metrics.inter_token.observe(decode_s / (receipt.longest - 1))
    logger.info(
        "request ended outcome=%s ttft_s=%s prompt=%d cached=%d output=%d "
        "reasoning=%d seconds=%.2f tps=%.1f",
        receipt.outcome,
        "-" if ttft_s is None else f"{ttft_s:.3f}",
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens,
        receipt.seconds,
        usage.completion_tokens / decode_s if ttft_s is not None else 0.0,
    )
