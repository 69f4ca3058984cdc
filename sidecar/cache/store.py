"""
KV kept for reuse: one radix tree per model.

A prompt is served from the longest stored path that is exactly a prefix of it.
Where nobody else uses that path its arrays are lent to the running sequence and taken
back at its end, so that a long conversation is neither copied nor held twice; else
they are copied. Sequences that run register their path, and others may copy from it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from sidecar.cache import kv_layers
from sidecar.cache.eviction import Limits, plan_eviction, plan_forgetting, problems
from sidecar.cache.kv_layers import KVLayers, Leaves
from sidecar.cache.node import Buffer, Lease, Node
from sidecar.cache.radix import Match, RadixTree, path_to
from sidecar.core.prompt import ModelIds
from sidecar.infra.counters import Counters

logger = logging.getLogger(__name__)

_ESSENTIAL = {"restore", "trim", "branch", "checkpoint"}
_ROOM = 256  # tokens of room behind a copied prefix
_SHRINK_SHARE = 8  # a buffer is copied smaller once this share of it is unused


class Restored(NamedTuple):
    """KV of the first `cached_len` ids of a prompt, free to be advanced."""

    cache: KVLayers
    cached_len: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose sequence is kept: guests weigh half, sessions cap their checkpoints."""

    session: str = ""
    is_guest: bool = False


Checkpoints = Mapping[int, tuple[int, list[Any]]]  # depth -> rank, layers


class PrefixStore:
    """
    `match_len` may be called from any thread; all else on the GPU thread.

    Args:
        new_cache: makes empty caches of the model.
    """

    def __init__(self, limits: Limits, new_cache: Callable[[], KVLayers]) -> None:
        self._limits = limits
        self._new_cache = new_cache
        self._tree = RadixTree()
        self._lock = threading.Lock()
        self._all_sliceable = kv_layers.is_sliceable(new_cache())
        self.switched_off: set[str] = set()
        self.counters = Counters(
            (
                "checkpoint_emitted", "checkpoint_hit", "checkpoint_evicted",
                "hybrid_trim_miss", "hybrid_trim_miss_tokens", "lent", "copied",
                "evicted_tokens",
            )
        )  # fmt: skip

    def switch_off(self, path: str) -> None:
        """Do without a way of reuse that failed its test (engine/selftest)."""
        self.switched_off.add(path)

    def rows(self) -> list[dict[str, Any]]:
        """The tree as rows for people: depth, tokens, bytes, who holds it."""
        with self._lock:
            return [
                {
                    "node": node.number,
                    "parent": node.parent.number if node.parent else None,
                    "start": node.start,
                    "end": node.end,
                    "lent": node.lent_to is not None,
                    "leases": len(node.leases),
                    "checkpoint_bytes": node.checkpoint_bytes,
                    "hits": node.hits,
                    "idle_s": round(time.monotonic() - node.touched, 1),
                    "guest": node.is_guest,
                    "session": node.session,
                }
                for node in self._tree.nodes()
            ]

    @property
    def needs_checkpoints(self) -> bool:
        """Whether some layer of the model cannot be cut back."""
        return not self._all_sliceable

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored KV and checkpoints; what is lent is not counted."""
        with self._lock:
            return self._num_bytes()

    def match_len(self, model_ids: ModelIds) -> int:
        """Length in tokens of the longest stored prefix; at most `len - 1`."""
        with self._lock:
            return self._usable(self._tree.match(model_ids), len(model_ids))

    def restore(self, model_ids: ModelIds) -> Restored:
        """Caches for a prompt: its longest stored prefix, or empty ones."""
        with self._lock:
            match = self._tree.match(model_ids)
            length = self._usable(match, len(model_ids))
            self._note_loss(match, min(match.depth, len(model_ids) - 1), length)
            if length == 0:
                return Restored(self._new_cache(), 0, Lease())
            last = self._tree.node_ending_at(model_ids, length)
            assert last is not None
            path = path_to(last)
            lease = Lease(nodes=path)
            arrays = self._lend(path, lease) or self._copy(path, length)
            checkpoint = last.checkpoint or []
            for node in path:
                node.leases.add(lease)
                node.touched, node.hits = time.monotonic(), node.hits + 1
            self.counters.add("checkpoint_hit", int(bool(checkpoint)))
        cache = self._new_cache()
        kv_layers.rebuild(cache, arrays, checkpoint, length)
        return Restored(cache, length, lease)

    def register(self, lease: Lease, ids: ModelIds, owner: Owner) -> None:
        """Show the path of a running sequence, so that others can copy from it."""
        if lease.live is None or not ids:
            return
        with self._lock:
            node = self._tree.grow(ids, buffer=None, lent_to=lease)
            if node is not None:
                self._mark(node, owner)
                node.leases.add(lease)
                lease.nodes.append(node)

    def give_back(
        self,
        lease: Lease,
        ids: ModelIds,
        cache: KVLayers,
        owner: Owner,
        checkpoints: Checkpoints,
    ) -> None:
        """
        End a running sequence: take its arrays back and keep what it computed.

        Args:
            ids: what its caches hold, or a beginning of that.
        """
        if lease.is_over:
            return
        held = kv_layers.depth(cache)
        if held is not None and held < len(ids):
            raise ValueError(f"caches hold {held} tokens, not {len(ids)}")
        with self._lock:
            start = self._owned_from(lease, ids)
        buffer = _keep(kv_layers.sliceable_leaves(cache), start, len(ids))
        with self._lock:
            self._attach(lease, ids, buffer, owner)
            self._add_checkpoints(ids, checkpoints, owner)
            self._release(lease)
            shrunk = self._evict()
        mx.eval(shrunk)

    def abandon(self, lease: Lease) -> None:
        """End a sequence whose caches are lost, with all that was lent to it."""
        with self._lock:
            lost = [n for n in self._tree.nodes() if n.lent_to is lease]
            for node in lost:
                if node.parent is not None and node.parent.lent_to is not lease:
                    self._tree.drop(node)
            self._release(lease)

    def check_integrity(self) -> list[str]:
        """What is wrong with the store; empty, always."""
        with self._lock:
            return list(problems(self._tree))

    def clear(self) -> None:
        """Forget everything; sequences that run keep their own arrays."""
        with self._lock:
            self._tree = RadixTree()
        mx.clear_cache()

    def _usable(self, match: Match, prompt_len: int) -> int:
        depth = min(match.depth, prompt_len - 1)
        if depth <= 0 or self.switched_off & _ESSENTIAL:
            return 0
        if self._all_sliceable:
            return depth
        node = match.checkpoint_at_most(depth)
        return node.end if node else 0

    def _note_loss(self, match: Match, depth: int, length: int) -> None:
        if length < depth and not self._all_sliceable:
            self.counters.add("hybrid_trim_miss", int(length == 0))
            self.counters.add("hybrid_trim_miss_tokens", depth - length)

    def _lend(self, path: Sequence[Node], lease: Lease) -> list[Leaves] | None:
        """Move the arrays out, if the path lies in one buffer nobody else uses."""
        buffer = path[0].buffer
        if buffer is None or buffer.start != 0 or "lend" in self.switched_off:
            return None
        if any(n.buffer is not buffer or n.leases for n in path):
            return None
        others = [n for n in self._tree.nodes() if n.buffer is buffer and n not in path]
        depth = path[-1].end
        if any(n.start < depth or n.leases for n in others):
            return None
        if buffer.end - depth > depth:
            return None  # copying the part that stays would cost more
        if others:
            kept = [kv_layers.cut(a, depth, buffer.length) for a in buffer.arrays]
            mx.eval(kept)
            tail = Buffer(kept, depth, buffer.length - depth)
            for node in others:
                node.buffer = tail
        for node in path:
            node.buffer, node.lent_to = None, lease
        self.counters.add("lent", 1)
        arrays, buffer.arrays = buffer.arrays, []
        return arrays

    def _copy(self, path: Sequence[Node], length: int) -> list[Leaves]:
        """The path's KV in new arrays, with room behind."""
        runs: list[list[Leaves]] = []
        for node in path:
            source, start = self._source(node)
            runs.append(
                [kv_layers.view(a, node.start - start, node.end - start)
                 for a in source]
            )  # fmt: skip
        self.counters.add("copied", 1)
        return [
            kv_layers.join([run[i] for run in runs], _ROOM) for i in range(len(runs[0]))
        ]

    def _source(self, node: Node) -> tuple[list[Leaves], int]:
        if node.buffer is not None:
            return node.buffer.arrays, node.buffer.start
        assert node.lent_to is not None
        assert node.lent_to.live is not None
        return kv_layers.sliceable_leaves(node.lent_to.live()), 0

    def _owned_from(self, lease: Lease, ids: ModelIds) -> int:
        """Depth from which the sequence's own arrays are needed by the tree."""
        match = self._tree.match(ids)
        lent = [n.start for n in match.nodes if n.lent_to is lease]
        return min([*lent, match.depth])

    def _attach(
        self, lease: Lease, ids: ModelIds, buffer: Buffer, owner: Owner
    ) -> None:
        for node in self._tree.match(ids).nodes:
            if node.lent_to is lease and node.end <= buffer.end:
                node.buffer, node.lent_to = buffer, None
            self._mark(node, owner)
        for node in [n for n in self._tree.nodes() if n.lent_to is lease]:
            if node.parent is not None and node.parent.lent_to is not lease:
                self._tree.drop(node)  # a path it did not get to compute
        grown = self._tree.grow(ids, buffer=buffer, lent_to=None)
        if grown is not None:
            self._mark(grown, owner)

    def _mark(self, node: Node, owner: Owner) -> None:
        node.touched = time.monotonic()
        node.session = node.session or owner.session
        if node.hits == 0 and not node.children:
            node.is_guest = owner.is_guest

    def _add_checkpoints(
        self, ids: ModelIds, checkpoints: Checkpoints, owner: Owner
    ) -> None:
        for depth, (rank, layers) in checkpoints.items():
            node = self._tree.node_ending_at(ids, depth)
            if node is None or node.checkpoint is not None:
                continue
            kv_layers.own_checkpoint(layers)
            node.checkpoint, node.checkpoint_rank = layers, rank
            node.session = owner.session
            self.counters.add("checkpoint_emitted", 1)

    def _release(self, lease: Lease) -> None:
        lease.is_over = True
        for node in lease.nodes:
            node.leases.discard(lease)
        lease.nodes, lease.live = [], None

    def _num_bytes(self) -> int:
        nodes = list(self._tree.nodes())
        buffers = {n.buffer for n in nodes if n.buffer is not None}
        checkpoints = sum(n.checkpoint_bytes for n in nodes)
        return sum(b.num_bytes for b in buffers) + checkpoints

    def _evict(self) -> list[list[Leaves]]:
        """Get back under the limits; arrays of buffers made smaller, to be computed."""
        shrunk: list[list[Leaves]] = []
        for node in plan_forgetting(self._tree, self._limits, self._num_bytes()):
            node.checkpoint = None
            self.counters.add("checkpoint_evicted", 1)
        while (
            step := plan_eviction(self._tree, self._limits, self._num_bytes())
        ) is not None:
            leaf, keep_until = step
            victim = leaf
            if leaf.start < keep_until:
                upper = self._tree.split(leaf, keep_until)
                victim = next(iter(upper.children.values()))
            self.counters.add("evicted_tokens", len(victim.ids))
            self._tree.drop(victim)
            shrunk += self._shrink(victim.buffer)
        if shrunk:
            mx.clear_cache()
        return shrunk

    def _shrink(self, buffer: Buffer | None) -> list[list[Leaves]]:
        """Copy a buffer smaller if much of it is unused: a slice frees nothing."""
        if buffer is None:
            return []
        ends = [n.end for n in self._tree.nodes() if n.buffer is buffer]
        used = max(ends, default=buffer.start) - buffer.start
        if used and (buffer.length - used) * _SHRINK_SHARE < buffer.length:
            return []
        buffer.arrays = [kv_layers.cut(a, 0, used) for a in buffer.arrays]
        buffer.length = used
        return [buffer.arrays]


def _keep(arrays: list[Leaves], start: int, end: int) -> Buffer:
    """A sequence's own arrays from a depth on; all of them move without a copy."""
    if start > 0 or not arrays or not arrays[0]:
        arrays = [kv_layers.cut(a, start, end) for a in arrays]
        mx.eval(arrays)
    return Buffer(arrays, start, end - start)
