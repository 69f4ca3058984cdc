"""A running request: its events, its deadline, its end."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from sidecar.core.errors import RequestCancelled, RequestTimeout
from sidecar.core.events import Event, Finished, Idle, Usage
from sidecar.engine.job import ChoiceEnded, Job, JobFailed, Prefilled, Token
from sidecar.engine.sampling import Sampling
from sidecar.infra.metrics import Metrics
from sidecar.service.choice import Choice
from sidecar.service.commit import TurnRecorder

logger = logging.getLogger(__name__)

_TICK_S = 0.1  # how soon a vanished client or a passed deadline is noticed


class Generation:
    """
    One admitted request. Read on one thread; `cancel` may come from any.

    Whoever holds it must `close` it, whatever happened.
    """

    def __init__(
        self,
        job: Job,
        choices: Sequence[Choice],
        timeout_s: float,
        metrics: Metrics,
        resources: contextlib.ExitStack,
    ) -> None:
        self._job = job
        self._choices = choices
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._resources = resources
        self._cancelled = threading.Event()
        self._cached_len = 0
        self._num_sampled: dict[int, int] = {}  # by choice
        self._first_token_at: float | None = None
        self._outcome = "client_gone"
        self._recorder: TurnRecorder | None = None
        self.headers: dict[str, str] = {}
        self.planned_usage = Usage(len(job.spec.model_ids), 0, 0, 0)
        self._metrics.active.inc()

    @property
    def plan(self) -> tuple[Sampling, int]:
        """Settled sampling and most tokens."""
        return self._job.spec.sampling, self._job.spec.max_tokens

    def cancel(self) -> None:
        """Stop it; its reader gets RequestCancelled."""
        self._cancelled.set()
        self._job.cancel()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have `callback` run at the close."""
        self._resources.callback(callback)

    def events(self) -> Iterator[Event]:
        """
        Events as they come; Idle when there is nothing to tell; Finished last.

        Raises:
            RequestCancelled, RequestTimeout: it was stopped.
            SidecarError: the engine failed.
        """
        open_choices = len(self._choices)
        while open_choices:
            self._check_stopped()
            event = self._job.next_event(_TICK_S)
            if event is None or isinstance(event, Prefilled):
                self._note_prefill(event)
                yield Idle()
            elif isinstance(event, Token):
                self._note_token(event)
                told = self._told(self._choices[event.choice].feed(event))
                yield from told or (Idle(),)  # held text must not look like a stall
            elif isinstance(event, ChoiceEnded):
                open_choices -= 1
                self._num_sampled[event.choice] = len(event.token_ids)
                if self._recorder:
                    self._recorder.end(event)
                yield from self._told(self._choices[event.choice].end(event))
            elif isinstance(event, JobFailed):
                self._outcome = event.error.code
                raise event.error
        self._outcome = "finished"
        if self._recorder:
            self._recorder.commit()
        yield Finished(self._usage())

    def record(self, recorder: TurnRecorder) -> None:
        """Have the turn remembered if it finishes cleanly, and told at its end."""
        self._recorder = recorder
        self.headers = recorder.headers
        self.planned_usage = recorder.planned_usage

    def _told(self, events: list[Event]) -> list[Event]:
        if self._recorder:
            for event in events:
                self._recorder.take(event)
        return events

    def close(self) -> None:
        """Free the engine, the lease and the place in the queue; idempotent."""
        self._resources.close()
        if self._outcome:
            self._report()
            self._outcome = ""

    def _check_stopped(self) -> None:
        if self._cancelled.is_set():
            self._outcome = "cancelled"
            raise RequestCancelled("the request was cancelled")
        if time.monotonic() > self._deadline:
            self._outcome = "timeout"
            raise RequestTimeout(f"no answer within {self._timeout_s:g} seconds")

    def _note_prefill(self, event: Prefilled | None) -> None:
        if event:
            self._cached_len = event.cached

    def _note_token(self, token: Token) -> None:
        # The end corrects it; who is cancelled before has had these.
        sampled = self._num_sampled.get(token.choice, 0)
        self._num_sampled[token.choice] = sampled + 1
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._metrics.ttft.observe(self._first_token_at - self._job.submitted)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self._job.spec.model_ids),
            completion_tokens=sum(self._num_sampled.values()),
            cached_tokens=self._cached_len,
            reasoning_tokens=sum(choice.num_reasoning for choice in self._choices),
        )

    def _report(self) -> None:
        now, usage = time.monotonic(), self._usage()
        metrics = self._metrics
        metrics.active.dec()
        metrics.jobs_ended.labels(self._outcome).inc()
        metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        metrics.tokens.labels("cached").inc(usage.cached_tokens)
        metrics.tokens.labels("generated").inc(usage.completion_tokens)
        first = self._first_token_at
        ttft_s = None if first is None else round(first - self._job.submitted, 4)
        if self._recorder:
            self._recorder.report(
                {
                    "outcome": self._outcome,
                    "prompt_tokens": usage.prompt_tokens,
                    "cached_tokens": usage.cached_tokens,
                    "output_tokens": usage.completion_tokens,
                    "reasoning_tokens": usage.reasoning_tokens,
                    "ttft_s": ttft_s,
                    "seconds": round(now - self._job.submitted, 4),
                }
            )
        decode_s = max(now - (now if first is None else first), 1e-9)
        logger.info(
            "request ended outcome=%s ttft_s=%s prompt=%d cached=%d output=%d "
            "reasoning=%d seconds=%.2f tps=%.1f",
            self._outcome,
            "-" if ttft_s is None else f"{ttft_s:.3f}",
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            now - self._job.submitted,
            usage.completion_tokens / decode_s if first is not None else 0.0,
        )
