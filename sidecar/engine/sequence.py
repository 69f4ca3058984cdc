"""
A sequence: one prompt, from its cached prefix to the end of its first choice.

It owns the KV that is computed for it. The scheduler moves it on by these methods, and
nothing else changes where its KV is:

    prefilling -- enter_batch --> decoding -- leave_batch, commit --> ended
    prefilling -- commit or abandon --> ended
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from sidecar.core.prompt import Boundary, ModelIds
from sidecar.engine.job import Job
from sidecar.engine.vision.prompt_images import PromptImages
from sidecar.engine.vision.vision_encoder import VisionEncoder
from sidecar.engine.vision.vision_inputs import VisionInputs
from sidecar.kv.checkpoints import planned_stops
from sidecar.kv.kv_layers import (
    KVLayers,
    arrays_of,
    borrow_layers,
    evaluate,
    take_checkpoint,
)
from sidecar.kv.prefix_tree import Restored
from sidecar.kv.window_layers import forgets, windowed

if TYPE_CHECKING:
    from sidecar.kv.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

State = Literal["prefilling", "decoding", "ended"]


class Sequence:
    """
    A prompt being computed, then its first choice. GPU thread only.

    Args:
        restored: the cached prefix, and the lease on it.
        stops: depths where a chunk must end, ascending, with the rank of the checkpoint
            that is taken there.
    """

    def __init__(self, job: Job, restored: Restored, stops: list[Boundary]) -> None:
        self.job = job
        self.cached_len = restored.cached_len
        self.done = restored.cached_len  # tokens whose KV it has
        self.stops = stops
        self.state: State = "prefilling"
        self.began = self.last_progress = time.monotonic()
        self.longest_gap_s = 0.0
        self.checkpoints: dict[int, tuple[int, list[Any]]] = {}
        self._layers = restored.cache
        self._extract: Callable[[], KVLayers] | None = None
        self._lease = restored.lease
        self.has_rotated = False
        self._prompt_images: PromptImages | None = None

    @property
    def layers(self) -> KVLayers:
        """Its KV now: its own while it prefills, its row of the batch afterwards."""
        return self._layers if self._extract is None else self._extract()

    @property
    def arrays(self) -> list[Any]:
        """The arrays that it holds itself: none while it decodes."""
        return arrays_of(self._layers)

    @property
    def target(self) -> int:
        """The last token goes through the decode batch: its logits are needed."""
        return len(self.job.spec.model_ids) - 1

    @property
    def done_ids(self) -> ModelIds:
        """The ids of the prompt whose KV it has."""
        return ModelIds(self.job.spec.model_ids[: self.done])

    def end_of_chunk(self, chunk_len: int, seams: Iterable[int] = ()) -> int:
        """
        Where the next chunk ends.

        Args:
            seams: places that no chunk goes across, beside those of checkpoints.
        """
        whole = self._prompt_images.whole_until if self._prompt_images else 0
        if self.done < whole:
            return whole
        end = min(self.done + chunk_len, self.target)
        places = (*(stop.depth for stop in self.stops), *seams)
        return min((place for place in places if self.done < place < end), default=end)

    def advance(self, end: int) -> None:
        """Note that tokens up to `end` are computed; take a checkpoint if due."""
        self.done = end
        self._note_progress()
        for stop in self.stops:
            if stop.depth == end:
                self.checkpoints[end] = (stop.rank, take_checkpoint(self._layers))

    def register(self, store: "PrefixStore") -> None:
        """Let other sequences copy the KV of its prompt from it."""
        if not self.has_rotated:
            store.register(self._lease, self.done_ids)

    def rotate(self, store: "PrefixStore", ids: ModelIds) -> None:
        """
        Keep what it holds, a whole window, and forget its middle from here on.

        Args:
            ids: whose KV it has.
        """
        self._keep(store, ids, ids)
        self._layers = windowed(borrow_layers(self._layers))
        evaluate(self._layers)
        self.has_rotated = True
        self.job.has_rotated |= forgets(self._layers)
        self.checkpoints.clear()

    def enter_batch(self, extract: Callable[[], KVLayers]) -> None:
        """
        Give the KV to a decode batch.

        Args:
            extract: reads its row out of the batch.
        """
        self.state = "decoding"
        self._layers, self._extract = [], extract

    def leave_batch(self, layers: KVLayers) -> None:
        """Take the KV of its row back."""
        self._layers, self._extract = layers, None

    def commit(self, store: "PrefixStore", ids: ModelIds, end: ModelIds | None) -> None:
        """
        Give the KV to the store; a failure there is a miss later.

        Args:
            ids: what is kept. end: what the KV is of, if a next turn may go on from
                there: a checkpoint is taken.
        """
        if self.has_rotated:  # it was kept before, and is no prefix's KV any more
            store.budget.released.hold(arrays_of(self._layers))
        else:
            self._keep(store, ids, end)
        self._end()

    def _keep(self, store: "PrefixStore", ids: ModelIds, end: ModelIds | None) -> None:
        try:
            evaluate(self._layers)
            if end and store.needs_checkpoints:
                self.checkpoints[len(end)] = (2, take_checkpoint(self._layers))
            store.commit_kv(self._lease, ids, self._layers, self.checkpoints)
        except Exception:
            logger.exception("could not keep KV num_tokens=%d", len(ids))
            store.abandon(self._lease)

    def abandon(self, store: "PrefixStore") -> None:
        """End it without keeping anything: its KV is lost."""
        try:
            store.budget.released.hold(arrays_of(self._layers))
            store.abandon(self._lease)
        finally:
            self._end()

    def _end(self) -> None:
        self.state = "ended"
        self._layers, self._extract = [], None

    def open(self, vision_encoder: VisionEncoder | None) -> None:
        """
        Get ready to look at the prompt's images, if it has any.

        Raises:
            ValueError: the model takes text only.
        """
        prompt = self.job.spec.prompt
        if prompt.images and self._prompt_images is None:
            if vision_encoder is None:
                raise ValueError("this model takes text only")
            self._prompt_images = PromptImages(vision_encoder, prompt)
            if 0 < self.done < self._prompt_images.whole_until:
                raise ValueError("its images are to be computed in one pass")

    def unseen(self, end: int) -> int:
        """How many ids the next image before a depth has, that is to be looked at."""
        placed = (
            self._prompt_images.unseen(self.done, end) if self._prompt_images else None
        )
        return placed.end - placed.start if placed else 0

    def encode(self, end: int) -> None:
        """The tower for one image before a depth, if its pixels are there."""
        placed = (
            self._prompt_images.unseen(self.done, end) if self._prompt_images else None
        )
        started = time.perf_counter()
        if self._prompt_images and placed and self._prompt_images.encode(placed):
            self._note_progress()
            seconds = time.perf_counter() - started
            logger.debug("looked at an image seconds=%.3f", seconds)

    def vision_inputs(self, end: int) -> VisionInputs | None:
        """What the model is given besides the next ids, up to a depth."""
        return (
            self._prompt_images.vision_inputs(self.done, end)
            if self._prompt_images
            else None
        )

    @property
    def shift(self) -> int:
        """How far its positions are from its number of tokens."""
        return self._prompt_images.shift if self._prompt_images else 0

    def _note_progress(self) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_progress)
        self.last_progress = now


def begin_sequence(job: Job, store: "PrefixStore", min_gap: int) -> Sequence:
    """Restore what is stored of a job's prompt, as far as its window goes."""
    prompt = job.spec.prompt
    ids = ModelIds(prompt.ids[: job.spec.num_kept])
    restored = store.restore(ids, prompt.conversation)
    stops: list[Boundary] = []
    if store.needs_checkpoints:
        stops = planned_stops(
            [place for place in prompt.boundaries if place.depth <= len(ids)],
            restored.cached_len,
            restored.shared_len,
            len(ids),
            min_gap,
        )
    sequence = Sequence(job, restored, stops)
    store.share(restored.lease, lambda: sequence.layers)
    return sequence
