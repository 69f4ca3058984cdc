"""Sequences on a KV store, driven as the batch loop drives them; GPU thread only."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx

from sidecar.core.conversation import Conversation, unknown
from sidecar.core.prompt import ModelIds
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.kv import kv_layers
from sidecar.kv.eviction import Limits
from sidecar.kv.kv_layers import KVLayers, take_checkpoint
from sidecar.kv.prefix_store import PrefixStore
from testkit.told_kv import tell

T = TypeVar("T")
Work = Callable[[KVLayers, Sequence[int], int, int], None]
ROOMY = Limits(max_bytes=1 << 30, max_leaves=1000)
NOBODY = unknown(0)


def owned(session: str, **more: Any) -> Conversation:
    """Of a session that a client without a key named."""
    return Conversation(None, session, **more)


def on_gpu(test: Callable[..., T]) -> Callable[..., T]:
    """Run a test on the thread that owns MLX."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> T:
        return gpu_thread().call(lambda: test(*args, **kwargs))

    return run


def some_ids(seed: int, length: int) -> ModelIds:
    """A prompt like no other."""
    chance = random.Random(f"ids {seed}")
    return ModelIds(tuple(chance.randrange(3000) for _ in range(length)))


def joined(*parts: Sequence[int]) -> ModelIds:
    """Runs of ids, one behind the other."""
    return ModelIds(tuple(i for part in parts for i in part))


class Running:
    """
    One running sequence.

    Args:
        prompt: it is restored and then computed up to its last token but one.
        work: advances a cache; by default with told KV.
    """

    def __init__(
        self,
        store: PrefixStore,
        prompt: ModelIds,
        owner: Conversation = NOBODY,
        work: Work = tell,
    ) -> None:
        self.store, self.prompt, self.ids = store, prompt, prompt
        self._work = work
        self.owner = replace(owner, generation=store.generation)
        restored = store.restore(prompt, self.owner)
        self.cache, self.lease = restored.cache, restored.lease
        self.cached_len = self.done = restored.cached_len
        self.checkpoints: dict[int, tuple[int, list[Any]]] = {}
        store.share(self.lease, lambda: self.cache)

    def advance(self, end: int, rank: int | None = None) -> None:
        """Compute up to a depth, and take a checkpoint there if it has a rank."""
        self._work(self.cache, self.ids, self.done, end)
        self.done = end
        if rank is not None and self.store.needs_checkpoints:
            self.checkpoints[end] = (rank, take_checkpoint(self.cache))

    def prefill(self, *stops: tuple[int, int]) -> "Running":
        """Compute the prompt, with checkpoints at `(depth, rank)`, and register it."""
        for depth, rank in stops:
            if self.done < depth < len(self.prompt) - 1:
                self.advance(depth, rank)
        self.advance(len(self.prompt) - 1, 2)
        self.register()
        return self

    def register(self) -> None:
        """Show the computed part to others."""
        self.store.register(self.lease, ModelIds(self.ids[: self.done]))

    def decode(self, ids: Sequence[int]) -> "Running":
        """Feed the prompt's last token and the sampled ones, one at a time."""
        self.ids = joined(self.prompt, ids)
        for end in range(self.done + 1, len(self.ids) + 1):
            self.advance(end)
        return self

    def finish(self) -> None:
        """End it cleanly."""
        if self.store.needs_checkpoints:
            self.checkpoints[self.done] = (2, take_checkpoint(self.cache))
        self.end_at(self.done)

    def end_at(self, depth: int) -> None:
        """Give the KV back, known to be good up to a depth."""
        kept = ModelIds(self.ids[:depth])
        store = self.store
        store.commit_kv(self.lease, kept, self.cache, self.checkpoints)
        self.cache = []

    def fail(self) -> None:
        """Lose the caches, as after a failed step."""
        self.cache = []
        self.store.abandon(self.lease)


def run(
    store: PrefixStore,
    prompt: ModelIds,
    answer: Sequence[int] = (),
    owner: Conversation = NOBODY,
    work: Work = tell,
) -> int:
    """A whole request; how much of its prompt was reused."""
    sequence = Running(store, prompt, owner, work).prefill().decode(answer)
    sequence.finish()
    return sequence.cached_len


def forward(model: Any) -> Work:
    """Real work: the model's own forward pass."""

    def work(cache: KVLayers, ids: Sequence[int], start: int, end: int) -> None:
        if start < end:
            model(mx.array([list(ids[start:end])]), cache=cache)
            kv_layers.evaluate(cache)

    return work
