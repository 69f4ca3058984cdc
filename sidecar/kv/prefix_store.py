"""
Finds, restores and keeps the longest stored prefix of a prompt, for one model.

It has one radix tree for each cache salt; `prefix_tree.py` does the matching. A prompt
is served from the longest stored path that is exactly a prefix of it.
Where nobody else uses that path the running sequence borrows its arrays; they are taken
back at its end, so that a long conversation is neither copied nor held twice; else
they are copied. Sequences that run register their path, and others may copy from it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from sidecar.core.conversation import Conversation, ForgetFilter, Generations, unknown
from sidecar.core.prompt import (
    Hit,
    ModelIds,
    Retreat,
    before_image,
    behind_images,
)
from sidecar.infra.metrics import Counters
from sidecar.kv import kv_layers, stored_runs
from sidecar.kv.drops import Drop
from sidecar.kv.eviction import KVBudget
from sidecar.kv.inspection import problems, tree_rows
from sidecar.kv.kv_layers import KVLayers, Leaves, release_freed_memory
from sidecar.kv.leases import (
    add_checkpoints,
    attach,
    borrow,
    borrowed_from_others,
    claim,
    copy_path,
    drop_borrowed,
    mark,
    owned_from,
    release_held,
    shrink,
    supersede,
)
from sidecar.kv.prefix_tree import (
    Buffer,
    Checkpoints,
    Lease,
    Match,
    Node,
    RadixTree,
    Reservation,
    Restored,
    is_path_of,
    path_to,
)
from sidecar.kv.quantization import KVQuantization
from sidecar.kv.stored_runs import Survey

logger = logging.getLogger(__name__)

_ESSENTIAL = {"chunks", "restore", "trim", "branch", "checkpoint"}
_COUNTED = (
    "checkpoint_emitted",
    "checkpoint_hit",
    "checkpoint_evicted",
    "hybrid_trim_miss",
    "hybrid_trim_miss_tokens",
    "lent",
    "copied",
    "evicted_tokens",
    "vlm_retreat",
)


class PrefixStore:
    """
    All on the GPU thread, but what says that any thread may call it.

    Args:
        budget: what it shares with the stores of other models.
        new_cache: makes empty caches for one sequence.
        quantization: of the KV, None for none.
    """

    def __init__(
        self,
        budget: KVBudget,
        new_cache: Callable[[], KVLayers],
        quantization: KVQuantization | None = None,
    ) -> None:
        self.budget = budget
        self._quantization = quantization
        self._new_cache = new_cache
        self._tree = RadixTree()
        self._lock = budget.lock
        self._generations = Generations()
        empty = new_cache()
        self._all_sliceable = kv_layers.is_sliceable(empty)
        self.layers = kv_layers.kinds(empty)
        self.switched_off: set[str] = set()  # ways of reuse: not tested yet, or failed
        self.whole_images = False  # a prompt is of use from behind its last image only
        self.verify = False  # CACHE_VERIFY: derive exactness anew at each hit
        self.on_kept: Callable[[ModelIds, Conversation], None] = _nobody
        self.counters = Counters(_COUNTED)
        budget.join(self._tree, self.counters)

    def rows(self) -> list[dict[str, Any]]:
        """The tree as rows for people."""
        with self._lock:
            return tree_rows(self._tree)

    @property
    def needs_checkpoints(self) -> bool:
        """Whether some layer of the model cannot be cut back."""
        return not self._all_sliceable

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored KV and checkpoints; what is borrowed is not counted."""
        with self._lock:
            return self._tree.num_bytes

    def match_len(self, model_ids: ModelIds, salt: str = "") -> int:
        """Tokens of the longest stored prefix, at most `len - 1`; any thread."""
        return self.lookup(model_ids, salt).memory_len

    def lookup(self, model_ids: ModelIds, salt: str) -> Hit:
        """What of a prompt is stored, and what of it in vain; any thread."""
        with self._lock:
            match = self._tree.match(model_ids, salt)
            length = self._usable(match, model_ids)
            depth = min(match.depth, len(model_ids) - 1)
            return Hit(length, retreat=self._retreat(model_ids, depth, length))

    def reserve(self, model_ids: ModelIds, salt: str) -> Reservation:
        """Have the longest stored prefix be evicted last; any thread."""
        reservation = Reservation()
        with self._lock:
            match = self._tree.match(model_ids, salt)
            length = self._usable(match, model_ids)
            last = next((node for node in match.nodes if node.end >= length > 0), None)
            if last is not None:
                last.reservations.add(reservation)
                reservation.nodes.append(last)
        return reservation

    def end_reservation(self, reservation: Reservation) -> None:
        """Let it be evicted as others are; any thread, repeatable."""
        with self._lock:
            for node in reservation.nodes:
                node.reservations.discard(reservation)
            reservation.nodes = []

    @property
    def generation(self) -> int:
        """How often something was forgotten; any thread."""
        return self._generations.now

    def new_generation(self, forget_filter: ForgetFilter | None = None) -> None:
        """What was begun before leaves nothing; any thread."""
        with self._lock:
            self._generations.end(forget_filter)

    def is_current(self, conversation: Conversation) -> bool:
        """Whether nothing of a conversation was forgotten since; any thread."""
        with self._lock:
            return self._generations.is_current(conversation)

    def _is_anything_kept(self, since: Conversation) -> bool:
        """Whether not all conversations were forgotten since; holds the lock."""
        return self._generations.is_current(unknown(since.generation))

    def restore(
        self, model_ids: ModelIds, conversation: Conversation | None = None
    ) -> Restored:
        """
        Caches for a prompt: its longest stored prefix, or empty ones.

        Args:
            conversation: of the prompt; None: no client's, begun now.
        """
        asked_by = conversation or unknown(self.generation)
        lease = Lease(asked_by)
        try:
            return self._restore(model_ids, lease)
        except Exception:
            logger.exception("restore failed num_tokens=%d", len(model_ids))
            self.abandon(lease)
            return Restored(self._new_cache(), 0, Lease(asked_by))

    def _restore(self, model_ids: ModelIds, lease: Lease) -> Restored:
        cache, salt = self._new_cache(), lease.conversation.salt
        with self._lock:
            if not self._is_anything_kept(lease.conversation):
                return Restored(cache, 0, lease)
            match = self._tree.match(model_ids, salt)
            length = self._usable(match, model_ids)
            self._note_loss(model_ids, min(match.depth, len(model_ids) - 1), length)
            if length == 0:
                return Restored(cache, 0, lease, match.depth)
            last = self._tree.node_ending_at(model_ids, length, salt)
            assert last is not None
            path = path_to(last)
            if self.verify and not is_path_of(path, model_ids):
                self.counters.add("invariant_violation")
                return Restored(cache, 0, lease)
            lease.nodes = path
            arrays = self._take(path, lease)
            checkpoint = last.checkpoint or []
            for node in path:
                node.leases.add(lease)
                node.touched, node.hits = time.monotonic(), node.hits + 1
            self.counters.add("checkpoint_hit", int(bool(checkpoint)))
        if self._quantization:
            self._quantization.fresh(cache, arrays)
        kv_layers.rebuild(cache, arrays, checkpoint, length)
        kv_layers.depth(cache)  # raises if a checkpoint is of another depth
        return Restored(cache, length, lease, match.depth)

    def share(self, lease: Lease, read: Callable[[], KVLayers]) -> None:
        """Have others read a sequence's caches, wherever they are at that time."""
        lease.live = read

    def register(self, lease: Lease, ids: ModelIds) -> None:
        """Show the path of a running sequence, so that others can copy from it."""
        conversation = lease.conversation
        if lease.live is None or not ids:
            return
        with self._lock:
            if not self._generations.is_current(conversation):
                return
            node = self._tree.grow(ids, conversation.salt, buffer=None, borrower=lease)
            if node is not None:
                mark(node, conversation)
                node.leases.add(lease)
                lease.nodes.append(node)

    def commit_kv(
        self,
        lease: Lease,
        ids: ModelIds,
        cache: KVLayers,
        checkpoints: Checkpoints,
    ) -> None:
        """
        End a running sequence: take its arrays back and keep what it computed.

        Args:
            ids: what its caches hold, or a beginning of that.
        """
        if lease.is_over:
            return
        if not (is_current := self.is_current(lease.conversation)):
            ids, checkpoints = self._hand_to_owner(lease, ids), {}
        conversation = lease.conversation
        if not ids:
            self.abandon(lease)
            return
        held = kv_layers.depth(cache)
        if held is not None and held < len(ids):
            raise ValueError(f"caches hold {held} tokens, not {len(ids)}")
        with self._lock:
            arrays = kv_layers.sliceable_leaves(cache)
            if not is_current:  # what is behind it is not kept as room
                arrays = [kv_layers.cut(a, 0, len(ids)) for a in arrays]
            is_plain = not any(map(kv_layers.is_quantized, arrays))
            start = owned_from(self._tree, lease, ids, is_plain=is_plain)
        buffer = claim(arrays, start, len(ids))
        self.budget.released.hold(kv_layers.arrays_of(cache))  # but what is stored now
        with self._lock:
            attach(self._tree, lease, ids, buffer)
            supersede(self._tree, ids, conversation)
            num_new = add_checkpoints(self._tree, ids, checkpoints, conversation)
            self.counters.add("checkpoint_emitted", num_new)
            self._release(lease)
            shrunk = self.budget.evict()
        mx.eval(shrunk)
        if conversation.is_known or is_current:
            self.on_kept(ids, conversation)

    def abandon(self, lease: Lease) -> None:
        """End a sequence whose caches are lost, with all that it borrowed."""
        with self._lock:
            drop_borrowed(self._tree, lease)
            self._release(lease)
            shrunk = self.budget.evict()  # what it held back may be over the limits
        mx.eval(shrunk)

    @property
    def may_restore(self) -> bool:
        """Whether what is stored is used at all: its tests have passed."""
        return not self.switched_off & _ESSENTIAL

    def survey(self, ids: ModelIds, salt: str) -> Survey:
        """What of a path could be read out; any thread."""
        with self._lock:
            return stored_runs.survey(self._tree, ids, salt)

    def read_run(self, ids: ModelIds, salt: str, start: int, layer: int) -> Leaves:
        """
        One layer's arrays from a depth to a path's end, not computed yet.

        Raises:
            Gone: they are not there to be read.
        """
        with self._lock:
            return stored_runs.read_run(
                self._tree, ids, salt, start, layer, self._quantization
            )

    def state_at(self, ids: ModelIds, salt: str) -> tuple[int, list[Any]]:
        """
        How many layers can be cut, and the checkpoint of the others at a path's end.

        Raises:
            Gone: the path is not there to be read.
        """
        with self._lock:
            num_layers = stored_runs.num_layers(self._tree, ids, salt)
            if not self.needs_checkpoints:
                return num_layers, []
            return num_layers, stored_runs.checkpoint_at(self._tree, ids, salt)

    def empty_cache(self, arrays: Sequence[Leaves] = ()) -> KVLayers:
        """Empty caches for one sequence, made to take such arrays."""
        cache = self._new_cache()
        if self._quantization:
            self._quantization.fresh(cache, arrays)
        return cache

    def insert(
        self,
        ids: ModelIds,
        conversation: Conversation,
        runs: Sequence[Buffer],
        checkpoint: list[Any],
    ) -> bool:
        """
        Store what was read from elsewhere; False: it reaches nothing, or was forgotten.

        Args:
            runs: of the path, each beginning where the one before it ends.
        """
        with self._lock:
            if not self._generations.is_current(conversation):
                return False
            is_whole = stored_runs.insert(
                self._tree, ids, conversation, runs, checkpoint
            )
            shrunk = self.budget.evict()
        mx.eval(shrunk)
        return is_whole

    def find_drop(self, conversation: Conversation, depth: int) -> Drop | None:
        """The last time that a session's KV behind a depth was let go; any thread."""
        with self._lock:
            return self.budget.drops.find(conversation, depth)

    def check_integrity(self) -> list[str]:
        """What is wrong with the store; empty, always."""
        with self._lock:
            return list(problems(self._tree))

    def detach(self) -> None:
        """Hold nothing of the model any more; what is stored stays."""
        self._new_cache = _not_loaded

    def attach(self, new_cache: Callable[[], KVLayers]) -> None:
        """Serve the same model, loaded again."""
        self._new_cache = new_cache

    def leave(self) -> None:
        """Be under the common limits no more, with all that is stored."""
        self.budget.leave(self._tree)

    def forget(self, forget_filter: ForgetFilter | None = None) -> int:
        """
        Forget everything, or some conversations; the bytes that came back.

        Sequences that run give nothing back but what they had borrowed from others.
        """
        before = mx.get_active_memory()
        with self._lock:
            self._generations.end(forget_filter)
            self.budget.drops.forget(forget_filter)
            buffers = self._tree.disown(forget_filter.covers if forget_filter else None)
            shrunk = [a for buffer in buffers for a in shrink(self._tree, buffer)]
        mx.eval(shrunk)
        del buffers, shrunk
        self.budget.released.let_go()
        release_freed_memory()
        return max(0, before - mx.get_active_memory())

    def _usable(self, match: Match, ids: ModelIds) -> int:
        depth = min(match.depth, len(ids) - 1)
        if depth <= 0 or self.switched_off & _ESSENTIAL:
            return 0
        if self._quantization and depth < self._quantization.start:
            depth = min(depth, match.plain_len)
        depth = self._legal(ids, depth)
        if self._all_sliceable or depth <= 0:
            return depth
        node = match.checkpoint_at_most(depth)
        while node and (legal := self._legal(ids, node.end)) < node.end:
            node = match.checkpoint_at_most(legal)
        return node.end if node else 0

    def _legal(self, ids: ModelIds, depth: int) -> int:
        """Where a prompt may be gone on from, as far as its images say."""
        legal = before_image(ids, depth)
        return legal if legal >= self.min_depth(ids) else 0

    def min_depth(self, ids: ModelIds) -> int:
        """Where it may be gone on from at the earliest; any thread."""
        return behind_images(ids) if self.whole_images else 0

    def _retreat(self, ids: ModelIds, depth: int, length: int) -> Retreat | None:
        """
        Why a prompt is not gone on from where its match ends.

        Args:
            depth: of the match. length: what of it is reused.
        """
        if length < depth and self._legal(ids, depth) < depth:
            return Retreat("vlm_retreat", depth - length)
        if length < depth and not self._all_sliceable:
            return Retreat("hybrid_trim_miss", depth - length)
        return None

    def _note_loss(self, ids: ModelIds, depth: int, length: int) -> None:
        self.counters.add("vlm_retreat", int(self._legal(ids, depth) < depth))
        if length < depth and not self._all_sliceable:
            self.counters.add("hybrid_trim_miss", int(length == 0))
            self.counters.add("hybrid_trim_miss_tokens", depth - length)

    def _hand_to_owner(self, lease: Lease, ids: ModelIds) -> ModelIds:
        """Give what was borrowed back to whom it was borrowed from; its ids."""
        with self._lock:
            borrowed, conversation = ModelIds(()), None
            if self._is_anything_kept(lease.conversation):
                borrowed, conversation = borrowed_from_others(self._tree, lease, ids)
            salt, now = lease.conversation.salt, self.generation
            lease.conversation = replace(
                conversation or unknown(now), salt=salt, generation=now
            )
        return borrowed

    def _release(self, lease: Lease) -> None:
        lease.is_over = True
        for node in lease.nodes:
            node.leases.discard(lease)
        lease.nodes, lease.live = [], None

    def _take(self, path: Sequence[Node], lease: Lease) -> list[Leaves]:
        """A path's arrays: borrowed where that can be, else copied."""
        may_borrow = "lend" not in self.switched_off
        arrays = borrow(self._tree, path, lease) if may_borrow else None
        self.counters.add("copied" if arrays is None else "lent")
        if arrays is None:
            arrays = copy_path(path, self._quantization)
        if may_borrow:
            release_held(self._tree, path, lease)
        return arrays


def _nobody(ids: ModelIds, conversation: Conversation) -> None:
    """Nobody wants to know what was kept."""


def _not_loaded() -> KVLayers:
    raise RuntimeError("the model is not loaded")
