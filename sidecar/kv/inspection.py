"""The prefix tree as rows for people, and the check of what must always hold in it."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sidecar.kv.prefix_tree import Buffer, Node, RadixTree


def tree_rows(tree: RadixTree) -> list[dict[str, Any]]:
    """One row a node: where it lies, what it holds, who uses it."""
    nodes = list(tree.nodes())
    used = Counter[Buffer]()
    for node in nodes:
        if node.buffer is not None:
            used[node.buffer] += len(node.ids)
    return [
        {
            "node": node.number,
            "parent": node.parent.number if node.parent else None,
            "start": node.start,
            "end": node.end,
            "lent": node.borrower is not None,
            "leases": len(node.leases),
            "kv_bytes": _share(node, used),
            "checkpoint_bytes": node.checkpoint_bytes,
            "hits": node.hits,
            "idle_s": round(time.monotonic() - node.touched, 1),
            "subagent": node.is_subagent,
            "superseded": node.is_superseded,
            "session": node.session[1],
        }
        for node in nodes
    ]


def _share(node: Node, used: Mapping[Buffer, int]) -> int:
    """Bytes of its buffer, by its part of the tokens there; 0 while borrowed."""
    if node.buffer is None:
        return 0
    return node.buffer.num_bytes * len(node.ids) // used[node.buffer]


def problems(tree: RadixTree) -> Iterator[str]:
    """What is wrong with a tree; nothing, ever."""
    yield from _miscounted(tree)
    for node in tree.nodes():
        where = f"node {node.number} at {node.start}"
        if not node.ids:
            yield f"{where} is empty"
        if node.parent is None or node.parent.children.get(node.ids[0]) is not node:
            yield f"{where} is not its parent's child"
        elif node.start != node.parent.end:
            yield f"{where} does not begin where its parent ends"
        if (node.buffer is None) == (node.borrower is None):
            yield f"{where} has its KV in no place or in two"
        if node.buffer is not None:
            yield from _buffer_problems(node, node.buffer, where)
        if node.borrower is not None and node.borrower.is_over:
            yield f"{where} is lent to a sequence that is over"


def _miscounted(tree: RadixTree) -> Iterator[str]:
    """What a walk through the tree finds and its counts do not."""
    nodes = list(tree.nodes())
    used: dict[Buffer, list[Node]] = {}
    for node in nodes:
        if node.buffer is not None:
            used.setdefault(node.buffer, []).append(node)
        if node.borrower is not None and node not in tree.borrowed_nodes(node.borrower):
            yield f"node {node.number} is lent, and not counted as lent"
    num_bytes = sum(buffer.num_bytes for buffer in used)
    num_bytes += sum(node.checkpoint_bytes for node in nodes)
    if num_bytes != tree.num_bytes:
        yield f"{tree.num_bytes} bytes are counted, and {num_bytes} are there"
    if set(used) != set(tree.buffers):
        yield f"{len(tree.buffers)} buffers are counted, and {len(used)} are there"
    for buffer, users in used.items():
        if set(users) != set(tree.users_of(buffer)):
            yield f"the buffer at {buffer.start} is counted for other nodes"
    if set(tree.leaves) != {node for node in nodes if not node.children}:
        yield "other nodes are counted as leaves"
    if set(tree.holders) != {node for node in nodes if node.checkpoint is not None}:
        yield "other nodes are counted as having checkpoints"


def _buffer_problems(node: Node, buffer: Buffer, where: str) -> Iterator[str]:
    if not (buffer.start <= node.start and node.end <= buffer.end):
        yield f"{where} lies outside its buffer"
    for arrays in buffer.arrays:
        if any(a.shape[-2] < buffer.length for a in arrays):
            yield f"{where} has a buffer shorter than its length"
