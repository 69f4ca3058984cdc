"""How a stored path gets to a running sequence, and what of it comes back."""

import time
from collections.abc import Sequence

import mlx.core as mx

from sidecar.core.conversation import Conversation
from sidecar.core.prompt import ModelIds
from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import Leaves
from sidecar.kv.prefix_tree import (
    Buffer,
    Checkpoints,
    Lease,
    Node,
    RadixTree,
    path_to,
    walk,
)
from sidecar.kv.quantization import KVQuantization

_SHRINK_SHARE = 8  # a buffer is copied smaller once this share of it is unused


def borrow(tree: RadixTree, path: Sequence[Node], lease: Lease) -> list[Leaves] | None:
    """
    Move a path's arrays out, if one buffer holds it all and nobody else uses that.

    What the buffer holds behind the path is copied out first; where that is the
    larger part, None: copying the path is cheaper. Nodes of the path that lie in
    other buffers as well stay where they are.
    """
    buffer = path[-1].buffer
    if buffer is None or buffer.start != 0:
        return None
    own = [n for n in path if n.buffer is buffer]
    if any(n.leases for n in own):
        return None
    others = [n for n in tree.users_of(buffer) if n not in own]
    depth = path[-1].end
    if any(n.start < depth or n.leases for n in others) or buffer.end - depth > depth:
        return None
    if others:
        kept = [kv_layers.cut(a, depth, buffer.length) for a in buffer.arrays]
        mx.eval(kept)
        tail = Buffer(kept, depth, buffer.length - depth)
        for node in others:
            tree.store(node, tail)
    for node in own:
        tree.borrow(node, lease)
    arrays, buffer.arrays = buffer.arrays, []
    return arrays


def release_held(tree: RadixTree, path: Sequence[Node], lease: Lease) -> None:
    """
    Drop the arrays that only a restored path uses: the sequence holds them as well.

    So a conversation that went through several buffers is in one after its turn.
    """
    on_path = set(path)
    buffers = {node.buffer for node in path if node.buffer is not None}
    kept = {
        buffer
        for buffer in buffers
        if any(n not in on_path or n.leases for n in tree.users_of(buffer))
    }
    for node in path:
        if node.buffer is not None and node.buffer not in kept:
            tree.borrow(node, lease)


def release_running(tree: RadixTree) -> list[Leaves]:
    """
    Drop all stored arrays that a running sequence holds as well; it gives them back.

    Without this the KV of a path in use would be held twice, and none of it could be
    evicted. Returns the arrays of buffers made smaller, to be computed.
    """
    emptied: set[Buffer] = set()
    for holder in tree.nodes():
        running = [lease for lease in holder.leases if lease.live]
        for node in path_to(holder) if running else ():
            if node.buffer is not None:
                emptied.add(node.buffer)
                tree.borrow(node, running[0])
    return [leaves for buffer in emptied for leaves in shrink(tree, buffer)]


def copy_path(
    path: Sequence[Node], quantization: KVQuantization | None = None
) -> list[Leaves]:
    """A path's KV in new arrays, with room behind."""
    runs: list[list[Leaves]] = []
    for node in path:
        source, start = _source(node)
        views = [
            kv_layers.view(a, node.start - start, node.end - start) for a in source
        ]
        runs.append(views)
    if quantization:
        runs = quantization.unify(runs)
    return [
        kv_layers.join([run[i] for run in runs], kv_layers.ROOM_STEP)
        for i in range(len(runs[0]))
    ]


def shrink(tree: RadixTree, buffer: Buffer | None) -> list[Leaves]:
    """
    Copy a buffer smaller if much of it is unused: a slice frees nothing.

    Returns the new arrays, to be computed.
    """
    if buffer is None:
        return []
    users = tree.users_of(buffer)
    start = min((n.start for n in users), default=buffer.start)
    end = max((n.end for n in users), default=start)
    if users and (buffer.length - (end - start)) * _SHRINK_SHARE < buffer.length:
        return []
    first = start - buffer.start
    kept = [kv_layers.cut(a, first, end - buffer.start) for a in buffer.arrays]
    tree.resize(buffer, kept, start, end)
    return kept


def claim(arrays: list[Leaves], start: int, end: int) -> Buffer:
    """
    A sequence's arrays, of which the tree needs those from a depth on.

    Where that is most of them they move without a copy, what is before included.
    """
    if start * _SHRINK_SHARE > end or not arrays or not arrays[0]:
        arrays = [kv_layers.cut(a, start, end) for a in arrays]
        mx.eval(arrays)
        return Buffer(arrays, start, end - start)
    return Buffer(arrays, 0, end)


def _source(node: Node) -> tuple[list[Leaves], int]:
    """The arrays that hold a node's KV, and the depth they begin at."""
    if node.buffer is not None:
        return node.buffer.arrays, node.buffer.start
    assert node.borrower is not None
    assert node.borrower.live is not None
    return kv_layers.sliceable_leaves(node.borrower.live()), 0


def owned_from(tree: RadixTree, lease: Lease, ids: ModelIds, *, is_plain: bool) -> int:
    """
    Depth from which the sequence's own arrays are needed by the tree.

    Args:
        is_plain: they are not quantised, and serve more prompts than what is.
    """
    match = tree.match(ids, lease.conversation.salt)
    borrowed = [n.start for n in match.nodes if n.borrower is lease]
    worse = [n.start for n in match.nodes if is_plain and _is_quantized(n)]
    return min([*borrowed, *worse, match.depth])


def attach(tree: RadixTree, lease: Lease, ids: ModelIds, buffer: Buffer) -> None:
    """Put a sequence's arrays under its path; drop what it did not get to compute."""
    conversation = lease.conversation
    for node in tree.path_of(ids, conversation.salt):
        is_better = _is_quantized(node) and buffer.is_plain
        is_held = buffer.start <= node.start and node.end <= buffer.end
        if is_held and (node.borrower is lease or is_better):
            tree.store(node, buffer)
        mark(node, conversation)
    drop_borrowed(tree, lease)
    grown = tree.grow(ids, conversation.salt, buffer=buffer, borrower=None)
    if grown is not None:
        mark(grown, conversation)


def borrowed_from_others(
    tree: RadixTree, lease: Lease, ids: ModelIds
) -> tuple[ModelIds, Conversation | None]:
    """What of a path a sequence borrows, and who used its end last."""
    path = tree.match(ids, lease.conversation.salt).nodes
    borrowed = [n for n in path if n.borrower is lease]
    if not borrowed:
        return ModelIds(()), None
    return ModelIds(ids[: borrowed[-1].end]), next(reversed(borrowed[-1].users), None)


def drop_borrowed(tree: RadixTree, lease: Lease) -> None:
    """Drop what a sequence still borrows: it does not come back."""
    for node in tree.borrowed_nodes(lease):
        if node.parent is not None and node.parent.borrower is not lease:
            tree.drop(node)


def _is_quantized(node: Node) -> bool:
    return node.buffer is not None and not node.buffer.is_plain


def mark(node: Node, conversation: Conversation) -> None:
    """Note who used a node, and when."""
    node.touched = time.monotonic()
    # What somebody waited for once is no batch's, and the other way round it is not.
    node.is_batch = conversation.is_batch and (node.is_batch or not node.users)
    node.used_by(conversation)
    if node.hits == 0 and not node.children:
        node.is_subagent = conversation.is_subagent


def supersede(tree: RadixTree, ids: ModelIds, conversation: Conversation) -> None:
    """
    Note that a conversation goes on along a path, and no more where it parted from it.

    An agent whose last message is never kept ends each request in a leaf that none
    goes on from. Behind the first turn that the model wrote for a conversation, what
    parts from its path is such an end; before it, another conversation may.
    """
    path = tree.match(ids, conversation.salt).nodes
    for number, node in enumerate(path):
        node.is_superseded = False
        if not 0 < conversation.own_len <= node.end:
            continue
        for child in node.children.values():
            if child not in path[number + 1 : number + 2]:
                for old in walk(child):
                    old.is_superseded = True


def add_checkpoints(
    tree: RadixTree, ids: ModelIds, checkpoints: Checkpoints, conversation: Conversation
) -> int:
    """Keep checkpoints on a path; how many were new."""
    num_new = 0
    for depth, (rank, layers) in checkpoints.items():
        node = tree.node_ending_at(ids, depth, conversation.salt)
        if node is None or node.checkpoint is not None:
            continue
        kv_layers.own_checkpoint(layers)
        tree.keep_checkpoint(node, layers, rank)
        node.used_by(conversation)
        num_new += 1
    return num_new
