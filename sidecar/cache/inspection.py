"""A look at a tree: for people, and for what must never be wrong."""

import time
from collections.abc import Iterator
from typing import Any

from sidecar.cache.node import Buffer, Node
from sidecar.cache.radix import RadixTree


def tree_rows(tree: RadixTree) -> list[dict[str, Any]]:
    """One row a node: where it lies, what it holds, who uses it."""
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
        for node in tree.nodes()
    ]


def problems(tree: RadixTree) -> Iterator[str]:
    """What is wrong with a tree; nothing, ever."""
    for node in tree.nodes():
        where = f"node {node.number} at {node.start}"
        if not node.ids:
            yield f"{where} is empty"
        if node.parent is None or node.parent.children.get(node.ids[0]) is not node:
            yield f"{where} is not its parent's child"
        elif node.start != node.parent.end:
            yield f"{where} does not begin where its parent ends"
        if (node.buffer is None) == (node.lent_to is None):
            yield f"{where} has its KV in no place or in two"
        if node.buffer is not None:
            yield from _buffer_problems(node, node.buffer, where)
        if node.lent_to is not None and node.lent_to.is_over:
            yield f"{where} is lent to a sequence that is over"


def _buffer_problems(node: Node, buffer: Buffer, where: str) -> Iterator[str]:
    if not (buffer.start <= node.start and node.end <= buffer.end):
        yield f"{where} lies outside its buffer"
    for arrays in buffer.arrays:
        if any(a.shape[-2] < buffer.length for a in arrays):
            yield f"{where} has a buffer shorter than its length"
