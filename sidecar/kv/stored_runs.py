"""Runs of a stored path: what there is, one read out, one that comes from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sidecar.core.conversation import Conversation
from sidecar.core.prompt import ModelIds
from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import Leaves
from sidecar.kv.leases import add_checkpoints, mark
from sidecar.kv.prefix_tree import Buffer, RadixTree
from sidecar.kv.quantization import KVQuantization


class Gone(Exception):
    """A run is not stored any more, or is with a sequence that runs."""


@dataclass(frozen=True, slots=True)
class Survey:
    """
    What is stored of a path.

    Args:
        depth: tokens that can be read out: of these none is borrowed.
        ends: depths of checkpoints on it, ascending, each with its rank and bytes.
        is_superseded: its conversation went on from before its end.
        token_bytes: of one token in the layers that can be cut.
    """

    depth: int
    ends: tuple[tuple[int, int, int], ...]
    is_superseded: bool
    token_bytes: int


def survey(tree: RadixTree, ids: ModelIds, salt: str) -> Survey:
    """Look along a path."""
    match, depth, ends = tree.match(ids, salt), 0, []
    token_bytes = 1
    for node in match.nodes:
        if node.buffer is None:
            break
        depth = min(node.end, match.depth)
        if node.checkpoint is not None and node.end <= match.depth:
            ends.append((node.end, node.checkpoint_rank, node.checkpoint_bytes))
        token_bytes = max(1, node.buffer.num_bytes // max(1, node.buffer.length))
    is_over = bool(match.nodes) and match.nodes[-1].is_superseded
    return Survey(depth, tuple(ends), is_over, token_bytes)


def read_run(
    tree: RadixTree,
    ids: ModelIds,
    salt: str,
    start: int,
    layer: int,
    quantization: KVQuantization | None,
) -> Leaves:
    """
    Arrays of one layer for the tokens from a depth to a path's end.

    They are not computed yet.

    Raises:
        Gone: some of it is not there to be read.
    """
    match = tree.match(ids, salt)
    if match.depth < len(ids):
        raise Gone("it is not stored any more")
    parts: list[Leaves] = []
    for node in match.nodes:
        first, last = max(start, node.start), min(len(ids), node.end)
        if first >= last:
            continue
        if node.buffer is None:
            raise Gone("a sequence runs on it")
        begin = node.buffer.start
        leaves = node.buffer.arrays[layer]
        parts.append(kv_layers.view(leaves, first - begin, last - begin))
    if quantization:
        parts = [run[0] for run in quantization.unify([[part] for part in parts])]
    if not parts or not parts[0]:
        return []
    if len(parts) == 1:
        return [mx.contiguous(a) for a in parts[0]]
    return [mx.concatenate(list(same), axis=-2) for same in zip(*parts, strict=True)]


def num_layers(tree: RadixTree, ids: ModelIds, salt: str) -> int:
    """Layers that can be cut, as they are stored on a path."""
    nodes = tree.match(ids, salt).nodes
    if not nodes or nodes[-1].buffer is None:
        raise Gone("it is not stored any more")
    return len(nodes[-1].buffer.arrays)


def checkpoint_at(tree: RadixTree, ids: ModelIds, salt: str) -> list[Any]:
    """
    The checkpoint at a path's end; empty without one.

    Raises:
        Gone: the path is not stored any more.
    """
    match = tree.match(ids, salt)
    if match.depth < len(ids) or not match.nodes or match.nodes[-1].end != len(ids):
        raise Gone("it is not stored any more")
    return match.nodes[-1].checkpoint or []


def insert(
    tree: RadixTree,
    ids: ModelIds,
    conversation: Conversation,
    runs: Sequence[Buffer],
    checkpoint: list[Any],
) -> bool:
    """
    Put runs that were read from elsewhere under a path; False: they do not reach it.

    Args:
        runs: ascending, each beginning where the one before it ends.
        checkpoint: at the path's end, of the layers that cannot be cut.
    """
    for run in runs:
        depth = tree.match(ids, conversation.salt).depth
        if run.start > depth:
            return False
        if run.end > depth:
            tree.grow(
                ModelIds(ids[: run.end]), conversation.salt, buffer=run, borrower=None
            )
    path = tree.path_of(ids, conversation.salt)
    if not path or path[-1].end < len(ids):
        return False
    for node in path:
        mark(node, conversation)
    if checkpoint:
        add_checkpoints(tree, ids, {len(ids): (1, checkpoint)}, conversation)
    return True
