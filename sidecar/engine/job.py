"""One queued generation: what it asks and would cost, its handle, what comes back."""

import itertools
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from sidecar.core.errors import SidecarError
from sidecar.core.events import TokenLogprob
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.engine.constrained_row import Constraint
from sidecar.engine.process_memory import NOTHING
from sidecar.engine.sampling import Sampling
from sidecar.engine.speculation.lookup_drafter import Sources
from sidecar.engine.speculation.row_speculation import DraftCount, DrafterName

# A client this far behind its stream has stopped reading.
_MAX_EVENTS = 16384
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class JobSpec:
    """
    What to generate.

    Args:
        prompt: at least one token.
        max_tokens: per choice, at least 1, already cut to the context.
        stop: stop strings, matched in decoded text.
        n: choices decoded from one prefill.
        top_logprobs: None for none; else how many alternatives a token.
        constraint: what each choice must keep to; None: nothing.
        sources: what the answer may repeat; None: nothing is drafted.
        window: tokens of the context, which forgets its middle beyond them; None: it
            is never that long.
    """

    prompt: ModelPrompt
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    sources: Sources | None = None
    window: int | None = None

    @property
    def num_kept(self) -> int:
        """Most tokens of the prompt whose KV is there at a time."""
        return min(len(self.model_ids), self.window or len(self.model_ids))

    @property
    def model_ids(self) -> ModelIds:
        """What the model reads."""
        return self.prompt.ids


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is being computed: `done` of `total` tokens, `cached` of them not."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token and the text that is now safe to show (may be empty)."""

    choice: int
    text: str
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """
    A choice is complete.

    Args:
        text: what was held back and is now safe to show.
        token_ids: all sampled ids, without the end-of-turn token.
        is_aborted: the watchdog ended it: nothing of it may be remembered.
    """

    choice: int
    text: str
    reason: Literal["stop", "length"]
    stop_string: str | None
    token_ids: tuple[int, ...]
    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Nothing more will come."""

    error: SidecarError


JobEvent = Prefilled | Token | ChoiceEnded | JobFailed


class Job:
    """
    The two ends of one generation.

    The HTTP thread reads `next_event` and may `cancel`; the GPU thread writes with
    `emit`, and `due`: what of the memory reserved for it is not in use yet. It counts
    what was drafted as well, which is read when the answer has ended.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.number = next(_numbers)
        self.submitted = time.monotonic()
        self.began_at: float | None = None  # by the GPU thread: readers may come late
        self.due = NOTHING
        self.draft_counts: Mapping[DrafterName, DraftCount] = {}
        self.has_rotated = False  # its context; by the GPU thread
        # The simple one takes no lock of Python's: a step of 16 rows puts 16 events.
        self._events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
        self._held: list[JobEvent] = []  # GPU thread only
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for this any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Give up: the engine drops the job at its next step."""
        self._cancelled.set()

    def emit(self, event: JobEvent) -> None:
        """Hand over an event; a reader that far behind loses the job."""
        self.emit_later(event)
        self.hand_over()

    def emit_later(self, event: JobEvent) -> None:
        """Hold an event until the next `hand_over` or `emit`."""
        self.began_at = self.began_at or time.monotonic()
        self._held.append(event)

    def hand_over(self) -> None:
        """Wake the reader with what is held."""
        for event in self._held:
            if self._events.qsize() < _MAX_EVENTS:
                self._events.put(event)
            else:
                self.cancel()
        self._held.clear()

    def next_event(self, timeout_s: float) -> JobEvent | None:
        """The next event, or None if none came in time."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None


@dataclass(frozen=True, slots=True)
class Forecast:
    """
    Counts in tokens, times in seconds from measured rates and the present queue.

    Args:
        predicted_s: until `max_tokens` answers are out.
        fits: whether it would be admitted as far as memory and context go.
        is_whole: False: it is so much too long that not all of it was counted.
    """

    prompt_tokens: int
    cached_tokens: int
    predicted_ttft_s: float
    predicted_s: float
    fits: bool
    max_context_tokens: int
    queued: int
    is_whole: bool = True

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def later(self, seconds: float) -> "Forecast":
        """The same, begun so many seconds later."""
        return replace(
            self,
            predicted_ttft_s=round(self.predicted_ttft_s + seconds, 4),
            predicted_s=round(self.predicted_s + seconds, 4),
        )
