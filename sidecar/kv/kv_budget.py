"""
One set of limits for the KV of all models, those included that are not loaded now.

What leaves is chosen by one score over all trees: a model's KV stays as long as it is
worth more than another one's, whoever computed it.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from sidecar.infra.metrics import Counters
from sidecar.kv.eviction import Limits, expires_in, plan_eviction, plan_forgetting
from sidecar.kv.kv_layers import Leaves
from sidecar.kv.leases import hand_over, shrink
from sidecar.kv.prefix_tree import RadixTree, stored_bytes


class KVBudget:
    """
    The trees under one set of limits.

    Args:
        limits: of all of them together.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lock = threading.Lock()  # of all trees: held while one is read or changed
        self._trees: dict[RadixTree, Counters] = {}

    def join(self, tree: RadixTree, counters: Counters) -> None:
        """Put a tree under the limits; what it loses is counted there."""
        with self.lock:
            self._trees[tree] = counters

    def leave(self, tree: RadixTree) -> None:
        """Take a tree out, with all it holds; repeatable."""
        with self.lock:
            self._trees.pop(tree, None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored KV and checkpoints; any thread."""
        with self.lock:
            return self._num_bytes()

    def expires_in(self) -> float:
        """Seconds in which surely nothing expires, 0 if something has; any thread."""
        with self.lock:
            return expires_in(tuple(self._trees), self.limits)

    def expire(self) -> None:
        """Let go what nobody asked for in its time; GPU thread only."""
        with self.lock:
            shrunk = self.evict()
        mx.eval(shrunk)
        mx.clear_cache()

    def evict_bytes(self, num_bytes: int) -> None:
        """Free at least that much, if it is there; GPU thread only."""
        with self.lock:
            target = max(0, self._num_bytes() - num_bytes)
            shrunk = [a for tree in self._trees for a in hand_over(tree)]
            shrunk += self._evict(replace(self.limits, max_bytes=target))
        mx.eval(shrunk)

    def evict(self) -> Sequence[Leaves]:
        """
        Get back under the limits; holds the lock already.

        Returns:
            Arrays of buffers made smaller, to be computed without the lock.
        """
        return self._evict(self.limits)

    def _num_bytes(self) -> int:
        return sum(map(stored_bytes, self._trees))

    def _evict(self, limits: Limits) -> list[Leaves]:
        trees, shrunk = tuple(self._trees), list[Leaves]()
        for tree, node in plan_forgetting(trees, limits):
            node.checkpoint = None
            self._trees[tree].add("checkpoint_evicted")
        while (step := plan_eviction(trees, limits, self._num_bytes())) is not None:
            tree, victim, keep_until = step
            if victim.start < keep_until:
                upper = tree.split(victim, keep_until)
                victim = next(iter(upper.children.values()))
            self._trees[tree].add("evicted_tokens", len(victim.ids))
            tree.drop(victim)
            shrunk += shrink(tree, victim.buffer)
        if shrunk:
            mx.clear_cache()
        return shrunk
