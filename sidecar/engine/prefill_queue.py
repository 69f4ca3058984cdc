"""
Prompts before their first token: which is computed next.

A prompt of which nearly all is stored would wait a minute behind a long cold one for
a second's work. So at a chunk's end short ones may go first, for as long as the chunk
took; then it is the long one's turn again, which so keeps half of the time at least.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidecar.config.settings import EngineConfig
from sidecar.core.errors import GenerationFailed, Unavailable
from sidecar.engine.job import ChoiceEnded, Job, JobFailed, Prefilled
from sidecar.engine.pacing import Watchdog
from sidecar.kv.prefix_store import PrefixStore

if TYPE_CHECKING:
    from sidecar.engine.sequence import Sequence

logger = logging.getLogger(__name__)


# What may pass needs this share at most of what the passed one needs.
_SHORT = 1 / 4


class PrefillQueue:
    """
    Jobs between submission and their first token. GPU thread only.

    Args:
        begin: restores what is stored of a job's prompt.
        chunk_len: tokens of the next chunk; a prompt with no more left is not passed.
    """

    def __init__(
        self,
        store: PrefixStore,
        config: EngineConfig,
        watchdog: Watchdog,
        begin: Callable[[Job], "Sequence"],
        chunk_len: Callable[[], int],
    ) -> None:
        self._store = store
        self._begin_sequence = begin
        self._chunk_len = chunk_len
        self._config = config
        self._watchdog = watchdog
        self._waiting: deque[Job] = deque()
        self._passed: Sequence | None = None
        self._shared_s = 0.0  # of the current prompt's time, to those that may pass
        self.current: Sequence | None = None

    @property
    def num_ahead(self) -> int:
        """Prompt tokens that will be computed before a job that comes now."""
        begun = [p.target - p.done for p in self.begun]
        return sum(begun) + sum(len(job.spec.model_ids) for job in tuple(self._waiting))

    @property
    def begun(self) -> list["Sequence"]:
        """Prompts of which a part is computed or restored."""
        return [p for p in (self.current, self._passed) if p]

    @property
    def jobs(self) -> list[Job]:
        """All of them."""
        return [*self._waiting, *(sequence.job for sequence in self.begun)]

    def __bool__(self) -> bool:
        return bool(self._waiting or self.current or self._passed)

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)

    def next(self, num_free: int) -> "Sequence | None":
        """
        The prompt whose chunk is next; its job is admitted if it was waiting.

        Args:
            num_free: places in the decode batches.
        """
        if self.current is None and self._passed is not None:
            self.current, self._passed = self._passed, None
            self.current.last_progress = time.monotonic()
        elif self.current is None:
            self._shared_s = 0.0
            # One that needs many places waits for them; others do not wait for it.
            fits = (job for job in self._waiting if job.spec.n <= num_free)
            if (job := next(fits, None)) is not None:
                self._waiting.remove(job)
                self._begin(job)
        if self.current is not None and self._passed is None and self._shared_s > 0:
            self._let_pass(self.current, num_free)
        return self.current

    def took(self, seconds: float) -> None:
        """Note how long the GPU was with the prompt that `next` named."""
        if self._passed is None:  # what passed it for too long has that to its debt
            self._shared_s = min(self._shared_s, 0.0) + seconds
        else:
            self._shared_s -= seconds

    def done(self) -> None:
        """The current prompt is computed, or given up."""
        self.current = None

    def give_up(self, sequence: "Sequence") -> None:
        """End the current prompt; what was computed is kept."""
        self.current = None
        self._keep(sequence)

    def drop_ended(self) -> None:
        """Take out what was cancelled, waited too long or makes no progress."""
        self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
        limit = self._config.queue_timeout_s
        while self._waiting and time.monotonic() - self._waiting[0].submitted > limit:
            late = Unavailable("waited too long in the queue", retry_after_s=5)
            self._waiting.popleft().emit(JobFailed(late))
        if self._passed and self._passed.job.is_cancelled:
            self._keep(self._passed)
            self._passed = None
        current = self.current
        if current and current.job.is_cancelled:
            self.current = None
            self._keep(current)
        elif current and self._is_late(current):
            self.current = None
            self._keep(current)
            for choice in range(current.job.spec.n):
                current.job.emit(ChoiceEnded(choice, "", "length", None, (), True))

    def _is_late(self, sequence: "Sequence") -> bool:
        is_over = self._watchdog.is_over(sequence.began, sequence.last_progress)
        return is_over or self._watchdog.is_stall(sequence.longest_gap_s)

    def _let_pass(self, long: "Sequence", num_free: int) -> None:
        left = long.target - long.done
        maximum = min(_SHORT * left, self._config.prefill_step_size)
        if left <= self._chunk_len():
            return
        for job in self._waiting:
            ids = job.spec.model_ids
            if job.spec.n + long.job.spec.n > num_free:
                continue
            if len(ids) - self._store.match_len(ids, job.spec.prompt.salt) <= maximum:
                self._waiting.remove(job)
                if self._begin(job):
                    self._passed = long
                return

    def _begin(self, job: Job) -> bool:
        try:
            self.current = self._begin_sequence(job)
        except BaseException as error:  # it is this job's alone, which waits for it
            logger.exception("a prompt could not be begun")
            failure = GenerationFailed(f"the prompt could not be begun: {error}")
            job.emit(JobFailed(failure))
            return False
        cached_len = self.current.cached_len
        job.emit(Prefilled(cached_len, len(job.spec.model_ids), cached_len))
        return True

    def _keep(self, sequence: "Sequence") -> None:
        sequence.commit(self._store, sequence.done_ids, sequence.done_ids)
