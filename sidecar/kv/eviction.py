"""
Which KV leaves when there is too much: its weight, and one limit for all models.

What leaves is chosen by one score over all trees, those included of models that are
not loaded now: KV stays as long as it is worth more than another's, whoever computed
it.
The order: what is expired; KV of batches; the leaf with the largest score, or before it
a sub-agent's of the same session; what a waiting request has reserved, only where
nothing else is left. Pure functions choose, and KVBudget removes.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from sidecar.core.prompt import BEFORE_LAST_USER, MESSAGE_END
from sidecar.infra.metrics import Counters
from sidecar.kv.drops import Drops, Reason
from sidecar.kv.kv_layers import Leaves, Released, arrays_of, release_freed_memory
from sidecar.kv.leases import release_running, shrink
from sidecar.kv.prefix_tree import Node, RadixTree, path_to

ANCHOR_LEN = 2048
_CHECKPOINT_SHARE = 0.25
_SUPERSEDED = MESSAGE_END + 1  # the rank of what no conversation went on from
# Factors of the score: a sub-agent's KV goes sooner, and what no conversation went on
# from much sooner.
_SUBAGENT_FACTOR, _SUPERSEDED_FACTOR = 2, 8


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Caps of all stores together.

    Args:
        max_bytes: KV and checkpoints. max_leaves: conversations. max_buffers: of the
            device's, that these lie in.
        ttl_s: idle seconds, 0 for ever.
        checkpoints_per_session: 0 for no such cap.
    """

    max_bytes: int
    max_leaves: int = 24
    ttl_s: float = 0.0
    checkpoints_per_session: int = 0
    checkpoints_in_all: int = 64
    max_buffers: float = math.inf


Trees = Sequence[RadixTree]


def plan_forgetting(trees: Trees, limits: Limits) -> list[tuple[RadixTree, Node]]:
    """
    Nodes whose checkpoint goes: beyond its share of the budget or the caps.

    The least worthy first. The first and the last of each path stay longest, unless
    the conversation went on from before its end. Of the others those of a session
    that is no longer used go before those of one that is, and within a session they
    go by rank, then what saves the fewest tokens.
    """
    places = {node: tree for tree in trees for node in tree.holders}
    holders = _least_worthy_first(list(places))
    room = int(limits.max_bytes * _CHECKPOINT_SHARE)
    max_per_session = limits.checkpoints_per_session or len(holders)
    total = sum(node.checkpoint_bytes for node in holders)
    per_session = Counter(node.session for node in holders)
    going, num_left = [], len(holders)
    for node in holders:
        if (
            total <= room
            and num_left <= limits.checkpoints_in_all
            and per_session[node.session] <= max_per_session
        ):
            continue
        if node.reservations:
            continue
        going.append((places[node], node))
        total -= node.checkpoint_bytes
        num_left -= 1
        per_session[node.session] -= 1
    return going


def _least_worthy_first(holders: Sequence[Node]) -> list[Node]:
    ranks = _ranks_now(holders)
    used: dict[tuple[str | None, str], float] = {}
    for node in holders:
        used[node.session] = max(node.touched, used.get(node.session, 0.0))

    def worth(node: Node) -> tuple[bool, float, int, bool, int, float, int]:
        rank = ranks[node]
        last_used = used[node.session] if rank else math.inf
        saving = _saving(node) if rank else 0
        return (
            not node.is_batch,
            last_used,
            -rank,
            not node.is_subagent,
            saving,
            node.touched,
            node.end,
        )

    return sorted(holders, key=worth)


def _saving(holder: Node) -> int:
    """Tokens that would be computed again without its checkpoint."""
    before = [node.end for node in path_to(holder)[:-1] if node.checkpoint is not None]
    return holder.end - max(before, default=0)


def _ranks_now(holders: Sequence[Node]) -> dict[Node, int]:
    """
    What checkpoints are worth now that their conversations went on.

    The last one of a path is where its next turn begins, and worth most. One before an
    older user message than the last is an ordinary message end.
    """
    continued: set[Node] = set()
    history: set[Node] = set()
    for holder in holders:
        ancestors = set(path_to(holder)[:-1])
        continued |= ancestors
        if holder.checkpoint_rank == BEFORE_LAST_USER:
            history |= ancestors
    ranks = {}
    for node in holders:
        rank = node.checkpoint_rank
        if node.is_superseded:
            rank = _SUPERSEDED
        elif node not in continued:
            rank = 0
        elif node in history and rank:
            rank = max(rank, MESSAGE_END)
        ranks[node] = rank
    return ranks


def expires_in(trees: Trees, limits: Limits) -> float:
    """
    Seconds in which surely nothing expires; 0: something has, infinite: it never does.

    What is in use or comes later has all of its time before it.
    """
    if not limits.ttl_s:
        return math.inf
    now = time.monotonic()
    leaves = (node for tree in trees for node in _free_leaves(tree))
    free = (node for node in leaves if not node.reservations)
    oldest = min((node.touched for node in free), default=now)
    return max(0.0, oldest + limits.ttl_s - now)


def score(node: Node, now: float) -> float:
    """Among the leaves of one group the largest goes first (see plan_eviction)."""
    found = eviction_score(now - node.touched, node.end, node.hits)
    if node.is_subagent:
        found *= _SUBAGENT_FACTOR
    if node.is_superseded:
        found *= _SUPERSEDED_FACTOR
    return found


def eviction_score(age_s: float, path_len: int, hits: int) -> float:
    """
    `age / (sqrt(len) * (1 + ln(1 + hits)))`.

    Ages under a second count as well: in a burst the newest goes last.
    """
    weight = math.sqrt(max(1, path_len)) * (1 + math.log(1 + hits))
    return max(0.0, age_s) / weight


def plan_eviction(
    trees: Trees, limits: Limits, num_bytes: int, *, spare_reserved: bool = True
) -> tuple[RadixTree, Node, int] | None:
    """
    The next leaf to lose its tail, its tree, the depth it keeps; None if all fits.

    Only as much of a leaf goes as is needed, cut at an anchor (every 2048 tokens).

    Args:
        spare_reserved: what is reserved for waiting requests stays.
    """
    over = num_bytes - limits.max_bytes
    is_within = over <= 0 and _are_few(trees, limits)
    if is_within and not limits.ttl_s:
        return None
    places = {
        node: tree
        for tree in trees
        for node in _free_leaves(tree)
        if not (spare_reserved and node.reservations)
    }
    now = time.monotonic()
    if limits.ttl_s:
        for node, tree in places.items():
            if now >= node.touched + limits.ttl_s:
                return tree, node, node.start
    if is_within or not places:
        return None
    # A batch never costs a conversation that somebody may go on with.
    batch = [node for node in places if node.is_batch]
    worst = max(batch or places, key=lambda node: score(node, now))
    if not (
        worst.is_batch or worst.is_subagent
    ):  # a flood of its sub-agents goes before the main thread
        subagents = [n for n in places if n.is_subagent and n.session == worst.session]
        worst = max(subagents, key=lambda node: score(node, now), default=worst)
    if over <= 0:
        return places[worst], worst, worst.start
    return places[worst], worst, max(worst.start, _kept_depth(worst, over))


def _are_few(trees: Trees, limits: Limits) -> bool:
    """Whether conversations, and the buffers that they lie in, are within the caps."""
    num_over = sum(len(tree.leaves) for tree in trees) - limits.max_leaves
    if num_over > 0:
        # What a batch is computing is the first to go when it ends: until then it costs
        # nobody a conversation.
        leaves = (node for tree in trees for node in tree.leaves)
        num_over -= sum(node.is_batch and _is_in_use(node) for node in leaves)
    if num_over > 0:
        return False
    return sum(tree.num_arrays for tree in trees) <= limits.max_buffers


def _free_leaves(tree: RadixTree) -> list[Node]:
    return [node for node in tree.leaves if not _is_in_use(node)]


def _is_in_use(node: Node) -> bool:
    return bool(node.leases) or node.borrower is not None


def _kept_depth(leaf: Node, over: int) -> int:
    if leaf.buffer is None or leaf.buffer.length == 0:
        return leaf.start
    per_token = leaf.buffer.num_bytes / leaf.buffer.length
    if per_token == 0 or leaf.checkpoint is not None:
        return leaf.start
    needed = int(over / per_token) + 1
    return max(0, leaf.end - needed) // ANCHOR_LEN * ANCHOR_LEN


def stored_arrays(trees: Iterable[RadixTree]) -> list[mx.array]:
    """The arrays of all buffers and checkpoints; each is a buffer of the device's."""
    runs = [b.arrays for tree in trees for b in tree.buffers]
    kept = [a for t in trees for n in t.holders for a in arrays_of(n.checkpoint or ())]
    return [a for arrays in runs for run in arrays for a in run] + kept


class KVBudget:
    """
    The trees under one set of limits.

    Args:
        limits: of all of them together.
        released: holds for a while what left them, and what ended.
    """

    def __init__(self, limits: Limits, released: Released | None = None) -> None:
        self.limits = limits
        self.released = Released() if released is None else released
        self.drops = Drops()
        self.lock = threading.Lock()  # of all trees: held while one is read or changed
        self._trees: dict[RadixTree, Counters] = {}
        self._oldest_touch = -math.inf  # of all leaves, when they were looked at

    def use(self, limits: Limits) -> None:
        """Go by other limits from now on; what is over them leaves at the next look."""
        with self.lock:
            self.limits = limits
            self._oldest_touch = -math.inf

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

    def arrays(self) -> list[mx.array]:
        """All stored KV and checkpoints; any thread."""
        with self.lock:
            return stored_arrays(self._trees)

    def expires_in(self) -> float:
        """Seconds in which surely nothing expires, 0 if something has; any thread."""
        with self.lock:
            return expires_in(tuple(self._trees), self.limits)

    def expire(self) -> None:
        """Let go what nobody asked for in its time; GPU thread only."""
        with self.lock:
            shrunk = self.evict()
        self._settle(shrunk)
        release_freed_memory()

    def evict_bytes(self, num_bytes: int) -> None:
        """Free at least that much, if it is there; GPU thread only."""
        with self.lock:
            target = max(0, self._num_bytes() - num_bytes)
            shrunk = self._evict_hard(replace(self.limits, max_bytes=target))
        self._settle(shrunk)

    def evict_buffers(self, num_buffers: int) -> None:
        """The same, by the number of the device's buffers."""
        with self.lock:
            target = max(0, sum(t.num_arrays for t in self._trees) - num_buffers)
            shrunk = self._evict_hard(replace(self.limits, max_buffers=target))
        self._settle(shrunk)

    def evict(self) -> Sequence[Leaves]:
        """
        Get back under the limits; holds the lock already.

        Returns:
            Arrays of buffers made smaller, to be computed without the lock.
        """
        return self._evict(self.limits)

    def _num_bytes(self) -> int:
        return sum(tree.num_bytes for tree in self._trees)

    def _settle(self, shrunk: Sequence[Leaves]) -> None:
        """Compute what was made smaller, and have the memory free now."""
        mx.eval(shrunk)
        self.released.let_go()

    def _evict_hard(self, limits: Limits) -> list[Leaves]:
        """Whatever running sequences hold as well goes first."""
        shrunk = [a for tree in self._trees for a in release_running(tree)]
        shrunk += self._evict(limits)
        return shrunk + self._evict(limits, spare_reserved=False)

    def _evict(self, limits: Limits, *, spare_reserved: bool = True) -> list[Leaves]:
        trees, shrunk = tuple(self._trees), list[Leaves]()
        if not self._may_expire(trees):
            limits = replace(limits, ttl_s=0.0)
        for tree, node in plan_forgetting(trees, limits):
            self.released.hold(arrays_of(node.checkpoint or ()))
            tree.drop_checkpoint(node)
            self._trees[tree].add("checkpoint_evicted")
        while step := plan_eviction(
            trees, limits, self._num_bytes(), spare_reserved=spare_reserved
        ):
            tree, victim, keep_until = step
            if victim.start < keep_until:
                upper = tree.split(victim, keep_until)
                victim = next(iter(upper.children.values()))
            self._trees[tree].add("evicted_tokens", len(victim.ids))
            self._note_drop(victim, limits)
            tree.drop(victim)
            self.released.hold(arrays_of(victim.checkpoint or ()))
            self.released.hold(victim.buffer.arrays if victim.buffer else ())
            shrunk += shrink(tree, victim.buffer)
        return shrunk

    def _note_drop(self, node: Node, limits: Limits) -> None:
        """Before it is dropped: what for, and whose it was."""
        is_old = limits.ttl_s and time.monotonic() >= node.touched + limits.ttl_s
        if is_old:
            limit = "PROMPT_CACHE_TTL_SECONDS"
        elif limits.max_bytes < self.limits.max_bytes:
            limit = "MAX_PROCESS_MEMORY"  # another model, or a prompt, needs the room
        elif self._num_bytes() > limits.max_bytes:
            limit = "PROMPT_CACHE_MAX_BYTES"
        else:
            limit = "PROMPT_CACHE_MAX_ENTRIES_GLOBAL"
        reason: Reason = "expired" if is_old else "evicted"
        self.drops.note(reason, node.users, node.end, limit)

    def _may_expire(self, trees: Trees) -> bool:
        """Whether leaves must be looked at one by one; seldom, as they may be many."""
        now, ttl_s = time.monotonic(), self.limits.ttl_s
        if not ttl_s or now < self._oldest_touch + ttl_s:
            return False
        leaves = (node for tree in trees for node in tree.leaves)
        self._oldest_touch = min((node.touched for node in leaves), default=now)
        return True
