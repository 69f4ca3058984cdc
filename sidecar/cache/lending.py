"""How a stored path gets to a running sequence: moved, or copied."""

from collections.abc import Sequence

import mlx.core as mx

from sidecar.cache import kv_layers
from sidecar.cache.kv_layers import Leaves
from sidecar.cache.node import Buffer, Lease, Node
from sidecar.cache.radix import RadixTree

_ROOM = 256  # tokens of room behind a copied prefix
_SHRINK_SHARE = 8  # a buffer is copied smaller once this share of it is unused


def lend(tree: RadixTree, path: Sequence[Node], lease: Lease) -> list[Leaves] | None:
    """
    Move a path's arrays out, if it lies in one buffer that nobody else uses.

    What the buffer holds behind the path is copied out first; where that is the
    larger part, None: copying the path is cheaper.
    """
    buffer = path[0].buffer
    if buffer is None or buffer.start != 0:
        return None
    if any(n.buffer is not buffer or n.leases for n in path):
        return None
    others = [n for n in tree.nodes() if n.buffer is buffer and n not in path]
    depth = path[-1].end
    if any(n.start < depth or n.leases for n in others) or buffer.end - depth > depth:
        return None
    if others:
        kept = [kv_layers.cut(a, depth, buffer.length) for a in buffer.arrays]
        mx.eval(kept)
        tail = Buffer(kept, depth, buffer.length - depth)
        for node in others:
            node.buffer = tail
    for node in path:
        node.buffer, node.lent_to = None, lease
    arrays, buffer.arrays = buffer.arrays, []
    return arrays


def copy_path(path: Sequence[Node]) -> list[Leaves]:
    """A path's KV in new arrays, with room behind."""
    runs: list[list[Leaves]] = []
    for node in path:
        source, start = _source(node)
        views = [
            kv_layers.view(a, node.start - start, node.end - start) for a in source
        ]
        runs.append(views)
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
    ends = [n.end for n in tree.nodes() if n.buffer is buffer]
    used = max(ends, default=buffer.start) - buffer.start
    if used and (buffer.length - used) * _SHRINK_SHARE < buffer.length:
        return []
    buffer.arrays = [kv_layers.cut(a, 0, used) for a in buffer.arrays]
    buffer.length = used
    return buffer.arrays


def take_over(arrays: list[Leaves], start: int, end: int) -> Buffer:
    """A sequence's own arrays from a depth on; all of them move without a copy."""
    if start > 0 or not arrays or not arrays[0]:
        arrays = [kv_layers.cut(a, start, end) for a in arrays]
        mx.eval(arrays)
    return Buffer(arrays, start, end - start)


def _source(node: Node) -> tuple[list[Leaves], int]:
    """The arrays that hold a node's KV, and the depth they begin at."""
    if node.buffer is not None:
        return node.buffer.arrays, node.buffer.start
    assert node.lent_to is not None
    assert node.lent_to.live is not None
    return kv_layers.sliceable_leaves(node.lent_to.live()), 0
