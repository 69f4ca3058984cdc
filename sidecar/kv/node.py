"""The parts of the tree: runs of ids, the buffers their KV lies in, leases."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sidecar.kv.kv_layers import (
    KVLayers,
    Leaves,
    checkpoint_nbytes,
    is_quantized,
    nbytes,
)

_numbers = itertools.count()


@dataclass(eq=False)
class Buffer:
    """
    KV of consecutive tokens of one path, shared by the nodes that lie on it.

    Args:
        arrays: for each sliceable layer; may have room behind `length`.
        start: depth of its first token. length: tokens in it.
    """

    arrays: list[Leaves]
    start: int
    length: int

    @property
    def end(self) -> int:
        """Depth behind its last token."""
        return self.start + self.length

    @property
    def num_bytes(self) -> int:
        """Bytes it really holds, room included."""
        return nbytes(self.arrays)

    @property
    def is_plain(self) -> bool:
        """Whether none of its layers is quantised."""
        return not any(map(is_quantized, self.arrays))


@dataclass(eq=False)
class Lease:
    """
    A running sequence's hold on the tree.

    Args:
        live: gives the sequence's caches now, for others that match its path.
        nodes: the path it restored; they go last. is_over: it was given back.
    """

    live: Callable[[], KVLayers] | None = None
    nodes: list["Node"] = field(default_factory=list)
    is_over: bool = False


@dataclass(eq=False)
class Node:
    """
    A run of ids from depth `start`, with its KV and maybe a checkpoint at its end.

    Exactly one of `buffer` and `lent_to` is set, but for the root, which has neither:
    while lent, the KV is in the running sequence's own caches.
    """

    ids: tuple[int, ...]
    start: int
    parent: "Node | None"
    buffer: Buffer | None = None
    lent_to: Lease | None = None
    checkpoint: list[Any] | None = None
    children: dict[int, "Node"] = field(default_factory=dict)
    leases: set[Lease] = field(default_factory=set)
    touched: float = 0.0
    hits: int = 0
    is_guest: bool = False
    is_superseded: bool = False  # its conversation went on from before its end
    session: str = ""
    checkpoint_rank: int = 9
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def end(self) -> int:
        """Depth at its end."""
        return self.start + len(self.ids)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of its checkpoint."""
        return checkpoint_nbytes(self.checkpoint) if self.checkpoint else 0

    def score(self, now: float) -> float:
        """Eviction score, the largest goes first; guests weigh half."""
        base = eviction_score(now - self.touched, self.end, self.hits)
        return base * (2 if self.is_guest else 1) * (8 if self.is_superseded else 1)


def eviction_score(age_s: float, path_len: int, hits: int) -> float:
    """
    `age / (sqrt(len) * (1 + ln(1 + hits)))`.

    Ages under a second count as well: in a burst the newest goes last.
    """
    weight = math.sqrt(max(1, path_len)) * (1 + math.log(1 + hits))
    return max(0.0, age_s) / weight


class Restored(NamedTuple):
    """
    KV of the first `cached_len` ids of a prompt, free to be advanced.

    `shared_len` ids are stored: more where no checkpoint lies as deep.
    """

    cache: KVLayers
    cached_len: int
    lease: Lease
    shared_len: int = 0


@dataclass(frozen=True, slots=True)
class Owner:
    """
    Whose sequence is kept: guests weigh half, sessions may cap their checkpoints.

    Args:
        own_len: tokens up to the end of the first turn that the model wrote for this
            conversation; 0: none is known. What parts from the sequence behind it
            are older ends of the same conversation.
        salt: whoever has another one finds nothing of it.
    """

    session: str = ""
    is_guest: bool = False
    own_len: int = 0
    salt: str = ""


Checkpoints = Mapping[int, tuple[int, list[Any]]]  # depth -> rank, layers
