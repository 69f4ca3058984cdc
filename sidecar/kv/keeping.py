"""What a finished sequence leaves in the tree: its nodes, its checkpoints."""

import time

from sidecar.core.prompt import ModelIds
from sidecar.kv import kv_layers
from sidecar.kv.node import Buffer, Checkpoints, Lease, Node, Owner
from sidecar.kv.prefix_tree import RadixTree, walk


def owned_from(
    tree: RadixTree, lease: Lease, ids: ModelIds, salt: str, *, is_plain: bool
) -> int:
    """
    Depth from which the sequence's own arrays are needed by the tree.

    Args:
        is_plain: they are not quantised, and serve more prompts than what is.
    """
    match = tree.match(ids, salt)
    lent = [n.start for n in match.nodes if n.lent_to is lease]
    worse = [n.start for n in match.nodes if is_plain and _is_quantized(n)]
    return min([*lent, *worse, match.depth])


def attach(
    tree: RadixTree, lease: Lease, ids: ModelIds, buffer: Buffer, owner: Owner
) -> None:
    """Put a sequence's arrays under its path; drop what it did not get to compute."""
    for node in tree.match(ids, owner.salt).nodes:
        is_better = _is_quantized(node) and buffer.is_plain
        is_held = buffer.start <= node.start and node.end <= buffer.end
        if is_held and (node.lent_to is lease or is_better):
            node.buffer, node.lent_to = buffer, None
        mark(node, owner)
    for node in [n for n in tree.nodes() if n.lent_to is lease]:
        if node.parent is not None and node.parent.lent_to is not lease:
            tree.drop(node)
    grown = tree.grow(ids, owner.salt, buffer=buffer, lent_to=None)
    if grown is not None:
        mark(grown, owner)


def _is_quantized(node: Node) -> bool:
    return node.buffer is not None and not node.buffer.is_plain


def mark(node: Node, owner: Owner) -> None:
    """Note who used a node, and when."""
    node.touched = time.monotonic()
    node.session = node.session or owner.session
    if node.hits == 0 and not node.children:
        node.is_guest = owner.is_guest


def supersede(tree: RadixTree, ids: ModelIds, owner: Owner) -> None:
    """
    Note that a conversation goes on along a path, and no more where it parted from it.

    An agent whose last message is never kept ends each request in a leaf that none
    goes on from. Behind the first turn that the model wrote for a conversation, what
    parts from its path is such an end; before it, another conversation may.
    """
    path = tree.match(ids, owner.salt).nodes
    for number, node in enumerate(path):
        node.is_superseded = False
        if not 0 < owner.own_len <= node.end:
            continue
        for child in node.children.values():
            if child not in path[number + 1 : number + 2]:
                for old in walk(child):
                    old.is_superseded = True


def add_checkpoints(
    tree: RadixTree, ids: ModelIds, checkpoints: Checkpoints, owner: Owner
) -> int:
    """Keep checkpoints on a path; how many were new."""
    num_new = 0
    for depth, (rank, layers) in checkpoints.items():
        node = tree.node_ending_at(ids, depth, owner.salt)
        if node is None or node.checkpoint is not None:
            continue
        kv_layers.own_checkpoint(layers)
        node.checkpoint, node.checkpoint_rank = layers, rank
        node.session = owner.session
        num_new += 1
    return num_new
