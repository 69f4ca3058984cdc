"""
Prompts being computed: whose turn it is, how far each is, its checkpoints.

A prompt of which nearly all is stored would wait a minute behind a long cold one for
a second's work. So at a chunk's end short ones may go first, for as long as the chunk
took; then it is the long one's turn again, which so keeps half of the time at least.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sidecar.config.settings import EngineConfig
from sidecar.core.errors import GenerationFailed, Unavailable
from sidecar.core.prompt import Boundary, ModelIds
from sidecar.engine.job import ChoiceEnded, Job, JobFailed, Prefilled
from sidecar.engine.looking import Looking
from sidecar.engine.pacing import Watchdog
from sidecar.engine.vision import Eyes, Sight
from sidecar.kv.kv_layers import KVLayers, evaluate, take_checkpoint
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import Lease

logger = logging.getLogger(__name__)

_RECENT_TOKENS = 2048
_BEFORE_PARTING = 64  # tokens: a line or two


@dataclass(eq=False)
class Prefill:
    """
    A job between admission and its first token. GPU thread only.

    Args:
        done: tokens in the caches. stops: depths where a chunk must end, ascending,
            with the rank of the checkpoint to be taken there.
    """

    job: Job
    cache: KVLayers
    cached_len: int
    lease: Lease
    done: int
    stops: list[Boundary]
    began: float = field(default_factory=lambda: time.monotonic())
    last_progress: float = field(default_factory=lambda: time.monotonic())
    longest_gap_s: float = 0.0
    checkpoints: dict[int, tuple[int, list[Any]]] = field(default_factory=dict)
    _looking: Looking | None = None

    @property
    def target(self) -> int:
        """The last token goes through the decode batch: its logits are needed."""
        return len(self.job.spec.model_ids) - 1

    @property
    def done_ids(self) -> ModelIds:
        """The ids the caches hold."""
        return ModelIds(self.job.spec.model_ids[: self.done])

    def end_of_chunk(self, chunk_len: int) -> int:
        """Where the next chunk ends."""
        whole = self._looking.whole_until if self._looking else 0
        if self.done < whole:
            return whole
        end = min(self.done + chunk_len, self.target)
        following = next((s.depth for s in self.stops if s.depth > self.done), end)
        return min(end, following)

    def advance(self, end: int) -> None:
        """Note that tokens up to `end` are computed; keep a checkpoint if due."""
        self.done = end
        self._note_progress()
        for stop in self.stops:
            if stop.depth == end:
                self.checkpoints[end] = (stop.rank, take_checkpoint(self.cache))

    def open(self, eyes: Eyes | None) -> None:
        """
        Get ready to look at the prompt's images, if it has any.

        Raises:
            ValueError: the model takes text only.
        """
        prompt = self.job.spec.prompt
        if prompt.images and self._looking is None:
            if eyes is None:
                raise ValueError("this model takes text only")
            self._looking = Looking(eyes, prompt)
            if 0 < self.done < self._looking.whole_until:
                raise ValueError("its images are to be computed in one pass")

    def unseen(self, end: int) -> int:
        """How many ids the next image before a depth has, that is to be looked at."""
        placed = self._looking.unseen(self.done, end) if self._looking else None
        return placed.end - placed.start if placed else 0

    def look(self, end: int) -> None:
        """The tower for one image before a depth, if its pixels are there."""
        placed = self._looking.unseen(self.done, end) if self._looking else None
        started = time.perf_counter()
        if self._looking and placed and self._looking.look(placed):
            self._note_progress()
            seconds = time.perf_counter() - started
            logger.debug("looked at an image seconds=%.3f", seconds)

    def sight(self, end: int) -> Sight | None:
        """What the model is told of the next ids, up to a depth, besides them."""
        return self._looking.sight(self.done, end) if self._looking else None

    @property
    def shift(self) -> int:
        """How far its positions are from its number of tokens."""
        return self._looking.shift if self._looking else 0

    def _note_progress(self) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_progress)
        self.last_progress = now


def begin(job: Job, store: PrefixStore, min_gap: int) -> Prefill:
    """Restore what is stored of a job's prompt."""
    ids = job.spec.model_ids
    prompt = job.spec.prompt
    restored = store.restore(ids, prompt.conversation)
    stops: list[Boundary] = []
    if store.needs_checkpoints:
        places = job.spec.prompt.boundaries
        if restored.shared_len - restored.cached_len >= min_gap:
            parting = places_of_parting(places, restored.shared_len)
            places = tuple(sorted({*places, *parting}, key=_at))
        stops = plan_stops(places, restored.cached_len, len(ids), min_gap)
    prefill = Prefill(
        job, restored.cache, restored.cached_len, restored.lease,
        restored.cached_len, stops,
    )  # fmt: skip
    prefill.lease.live = lambda: prefill.cache
    return prefill


def places_of_parting(places: Sequence[Boundary], depth: int) -> set[Boundary]:
    """
    Where two prompts part inside a message, and where a third may part from both.

    It may well do so a little earlier (another day of the same month), or within the
    same message somewhere: so there is one before the parting, and one at the end of
    the last message before it.
    """
    message_end = max(
        (place.depth for place in places if place.depth < depth), default=0
    )
    earlier = max(message_end, depth - _BEFORE_PARTING)
    return {Boundary(at, 0) for at in (message_end, earlier, depth) if at > 0}


def plan_stops(
    boundaries: tuple[Boundary, ...], start: int, length: int, min_gap: int
) -> list[Boundary]:
    """
    Where to take checkpoints in one prefill pass.

    All places of high rank and the end; message ends in the last 2048 tokens; other
    message ends at least `min_gap` tokens apart.
    """
    last = length - 1
    chosen: list[Boundary] = []
    previous = start
    for place in boundaries:
        if not start < place.depth < last:
            continue
        is_near = place.depth >= length - _RECENT_TOKENS
        if place.rank <= 2 or is_near or place.depth - previous >= min_gap:
            chosen.append(place)
            previous = place.depth
    if last > start:
        chosen.append(Boundary(last, 2))
    return chosen


def _at(place: Boundary) -> tuple[int, int]:
    return place.depth, place.rank


def keep(
    store: PrefixStore, prefill: Prefill, ids: ModelIds, end: ModelIds | None
) -> None:
    """
    Give a sequence's KV to the store; a failure there is a miss later.

    Args:
        ids: what is kept. end: what the caches hold, if a next turn may continue
            from there: a checkpoint is taken.
    """
    try:
        evaluate(prefill.cache)
        if end and store.needs_checkpoints:
            prefill.checkpoints[len(end)] = (2, take_checkpoint(prefill.cache))
        store.give_back(prefill.lease, ids, prefill.cache, prefill.checkpoints)
    except Exception:
        logger.exception("could not keep KV num_tokens=%d", len(ids))
        store.abandon(prefill.lease)
    prefill.cache = []


# What may pass needs at most a chunk, and this share of what the passed one needs.
_SHORT = 1 / 4


class PrefillQueue:
    """Jobs between submission and their first token. GPU thread only."""

    def __init__(
        self, store: PrefixStore, config: EngineConfig, watchdog: Watchdog
    ) -> None:
        self._store = store
        self._config = config
        self._watchdog = watchdog
        self._waiting: deque[Job] = deque()
        self._passed: Prefill | None = None
        self._lent_s = 0.0  # of the current prompt's time, to those that may pass
        self.current: Prefill | None = None

    @property
    def num_ahead(self) -> int:
        """Prompt tokens that will be computed before a job that comes now."""
        begun = [p.target - p.done for p in self.begun]
        return sum(begun) + sum(len(job.spec.model_ids) for job in tuple(self._waiting))

    @property
    def begun(self) -> list[Prefill]:
        """Prompts of which a part is computed or restored."""
        return [p for p in (self.current, self._passed) if p]

    def __bool__(self) -> bool:
        return bool(self._waiting or self.current or self._passed)

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)

    def next(self, num_free: int) -> Prefill | None:
        """
        The prompt whose chunk is next; its job is admitted if it was waiting.

        Args:
            num_free: places in the decode batches.
        """
        if self.current is None and self._passed is not None:
            self.current, self._passed = self._passed, None
            self.current.last_progress = time.monotonic()
        elif self.current is None:
            self._lent_s = 0.0
            if self._waiting and self._waiting[0].spec.n <= num_free:
                self._begin(self._waiting.popleft())
        if self.current is not None and self._passed is None and self._lent_s > 0:
            self._let_pass(self.current, num_free)
        return self.current

    def took(self, seconds: float) -> None:
        """Note how long the GPU was with the prompt that `next` named."""
        if self._passed is None:
            self._lent_s = seconds
        else:
            self._lent_s -= seconds

    def done(self) -> None:
        """The current prompt is computed, or given up."""
        self.current = None

    def give_up(self, prefill: Prefill) -> None:
        """End the current prompt; what was computed is kept."""
        self.current = None
        self._keep(prefill)

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

    def _is_late(self, prefill: Prefill) -> bool:
        is_over = self._watchdog.is_over(prefill.began, prefill.last_progress)
        return is_over or self._watchdog.is_stall(prefill.longest_gap_s)

    def _let_pass(self, long: Prefill, num_free: int) -> None:
        left = long.target - long.done
        most = min(_SHORT * left, self._config.prefill_step_size)
        if left < self._config.prefill_step_size:
            return
        for job in self._waiting:
            ids = job.spec.model_ids
            if job.spec.n + long.job.spec.n > num_free:
                continue
            if len(ids) - self._store.match_len(ids, job.spec.prompt.salt) <= most:
                self._waiting.remove(job)
                if self._begin(job):
                    self._passed = long
                return

    def _begin(self, job: Job) -> bool:
        try:
            self.current = begin(job, self._store, self._config.checkpoint_gap)
        except Exception as error:  # it is this job's alone, which waits to be told
            logger.exception("a prompt could not be begun")
            failure = GenerationFailed(f"the prompt could not be begun: {error}")
            job.emit(JobFailed(failure))
            return False
        cached_len = self.current.cached_len
        job.emit(Prefilled(cached_len, len(job.spec.model_ids), cached_len))
        return True

    def _keep(self, prefill: Prefill) -> None:
        keep(self._store, prefill, prefill.done_ids, prefill.done_ids)
