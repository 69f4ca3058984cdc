"""One prompt being computed: its caches, how far it is, its checkpoints."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.prompt import Boundary, ModelIds
from sidecar.engine.job import Job
from sidecar.kv.kv_layers import KVLayers, evaluate, take_checkpoint
from sidecar.kv.node import Lease, Owner
from sidecar.kv.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

_RECENT_TOKENS = 2048


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

    @property
    def target(self) -> int:
        """The last token goes through the decode batch: its logits are needed."""
        return len(self.job.spec.model_ids) - 1

    @property
    def owner(self) -> Owner:
        """Whose KV this is."""
        spec = self.job.spec
        return Owner(spec.session, spec.is_guest, spec.own_len, spec.salt)

    @property
    def done_ids(self) -> ModelIds:
        """The ids the caches hold."""
        return ModelIds(self.job.spec.model_ids[: self.done])

    def end_of_chunk(self, chunk_len: int) -> int:
        """Where the next chunk ends."""
        end = min(self.done + chunk_len, self.target)
        following = next((s.depth for s in self.stops if s.depth > self.done), end)
        return min(end, following)

    def advance(self, end: int) -> None:
        """Note that tokens up to `end` are computed; keep a checkpoint if due."""
        self.done = end
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_progress)
        self.last_progress = now
        for stop in self.stops:
            if stop.depth == end:
                self.checkpoints[end] = (stop.rank, take_checkpoint(self.cache))


def begin(job: Job, store: PrefixStore, min_gap: int) -> Prefill:
    """Restore what is stored of a job's prompt."""
    ids = job.spec.model_ids
    restored = store.restore(ids, job.spec.salt)
    stops: list[Boundary] = []
    if store.needs_checkpoints:
        places = job.spec.boundaries
        if restored.shared_len - restored.cached_len >= min_gap:
            # Two prompts part here, inside a message: a third may do so as well.
            places = tuple(sorted({*places, Boundary(restored.shared_len, 0)}, key=_at))
        stops = plan_stops(places, restored.cached_len, len(ids), min_gap)
    prefill = Prefill(
        job, restored.cache, restored.cached_len, restored.lease,
        restored.cached_len, stops,
    )  # fmt: skip
    prefill.lease.live = lambda: prefill.cache
    return prefill


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
        store.give_back(
            prefill.lease, ids, prefill.cache, prefill.owner, prefill.checkpoints
        )
    except Exception:
        logger.exception("could not keep KV num_tokens=%d", len(ids))
        store.abandon(prefill.lease)
    prefill.cache = []
