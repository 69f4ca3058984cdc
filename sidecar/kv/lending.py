"""How a stored path gets to a running sequence: moved, or copied."""

from collections.abc import Sequence

import mlx.core as mx

from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import Leaves
from sidecar.kv.node import Buffer, Lease, Node
from sidecar.kv.prefix_tree import RadixTree, path_to
from sidecar.kv.quantization import KVQuantization

_ROOM = 256  # tokens of room behind a copied prefix
_SHRINK_SHARE = 8  # a buffer is copied smaller once this share of it is unused


def lend(tree: RadixTree, path: Sequence[Node], lease: Lease) -> list[Leaves] | None:
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
    others = [n for n in tree.nodes() if n.buffer is buffer and n not in own]
    depth = path[-1].end
    if any(n.start < depth or n.leases for n in others) or buffer.end - depth > depth:
        return None
    if others:
        kept = [kv_layers.cut(a, depth, buffer.length) for a in buffer.arrays]
        mx.eval(kept)
        tail = Buffer(kept, depth, buffer.length - depth)
        for node in others:
            node.buffer = tail
    for node in own:
        node.buffer, node.lent_to = None, lease
    arrays, buffer.arrays = buffer.arrays, []
    return arrays


def release_held(tree: RadixTree, path: Sequence[Node], lease: Lease) -> None:
    """
    Drop the arrays that only a restored path uses: the sequence holds them as well.

    So a conversation that went through several buffers is in one after its turn.
    """
    on_path = set(path)
    kept = {n.buffer for n in tree.nodes() if n not in on_path or n.leases}
    for node in path:
        if node.buffer is not None and node.buffer not in kept:
            node.buffer, node.lent_to = None, lease


def hand_over(tree: RadixTree) -> list[Leaves]:
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
                node.buffer, node.lent_to = None, running[0]
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
        kv_layers.join([run[i] for run in runs], _ROOM) for i in range(len(runs[0]))
    ]


def shrink(tree: RadixTree, buffer: Buffer | None) -> list[Leaves]:
    """
    Copy a buffer smaller if much of it is unused: a slice frees nothing.

    Returns the new arrays, to be computed.
    """
    if buffer is None:
        return []
    users = [n for n in tree.nodes() if n.buffer is buffer]
    start = min((n.start for n in users), default=buffer.start)
    end = max((n.end for n in users), default=start)
    if users and (buffer.length - (end - start)) * _SHRINK_SHARE < buffer.length:
        return []
    first = start - buffer.start
    buffer.arrays = [kv_layers.cut(a, first, end - buffer.start) for a in buffer.arrays]
    buffer.start, buffer.length = start, end - start
    return buffer.arrays


def take_over(arrays: list[Leaves], start: int, end: int) -> Buffer:
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
    assert node.lent_to is not None
    assert node.lent_to.live is not None
    return kv_layers.sliceable_leaves(node.lent_to.live()), 0
