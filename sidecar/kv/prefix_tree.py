"""
The tree of ids: match, grow, split, drop. No arrays are computed here.

Children of a node begin with different ids; the depth of a node's end is the number
of ids on the path to it, always.

What a tree holds is counted where it changes hands: the bytes, who uses a buffer, what
sequences borrow, which nodes are leaves. So no request walks through all that is
kept; `kv/inspection.problems` compares the counts with such a walk.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sidecar.core.conversation import Conversation, key_of, unknown
from sidecar.kv.kv_layers import (
    KVLayers,
    Leaves,
    arrays_of,
    checkpoint_nbytes,
    is_quantized,
    nbytes,
)

_numbers = itertools.count()

_MAX_USERS = 16  # sessions of a node that are remembered


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
        conversation: of the sequence.
        live: gives the sequence's caches now, for others that match its path.
        nodes: the path it restored; they go last. is_over: it was given back.
    """

    conversation: Conversation = unknown(0)
    live: Callable[[], KVLayers] | None = None
    nodes: list["Node"] = field(default_factory=list)
    is_over: bool = False


@dataclass(eq=False)
class Reservation:
    """A waiting request's hold on what it will reuse: it is evicted last."""

    nodes: list["Node"] = field(default_factory=list)


@dataclass(eq=False)
class Node:
    """
    A run of ids from depth `start`, with its KV and maybe a checkpoint at its end.

    Exactly one of `buffer` and `lent_to` is set, but for the root, which has neither:
    while borrowed, the KV is in the running sequence's own caches.
    """

    ids: tuple[int, ...]
    start: int
    parent: "Node | None"
    buffer: Buffer | None = None
    borrower: Lease | None = None
    checkpoint: list[Any] | None = None
    children: dict[int, "Node"] = field(default_factory=dict)
    leases: set[Lease] = field(default_factory=set)
    reservations: set[Reservation] = field(default_factory=set)
    touched: float = 0.0
    hits: int = 0
    is_subagent: bool = False
    is_batch: bool = False  # of a request that nobody waited for
    is_superseded: bool = False  # its conversation went on from before its end
    # Sessions with prompts that it is a part of, the oldest first.
    users: dict[Conversation, None] = field(default_factory=dict)
    checkpoint_rank: int = 9
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def end(self) -> int:
        """Depth at its end."""
        return self.start + len(self.ids)

    @property
    def session(self) -> tuple[str | None, str]:
        """The key and the name of the first session that used it."""
        return next(((key_of(u.tenant), u.session) for u in self.users), (None, ""))

    def used_by(self, conversation: Conversation) -> None:
        """Note a session with a prompt that it is a part of; the oldest of many go."""
        if conversation.is_known:
            self.users[Conversation(conversation.tenant, conversation.session)] = None
        while len(self.users) > _MAX_USERS:
            self.users.pop(next(iter(self.users)))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of its checkpoint."""
        return checkpoint_nbytes(self.checkpoint) if self.checkpoint else 0


class Restored(NamedTuple):
    """
    KV of the first `cached_len` ids of a prompt, free to be advanced.

    `shared_len` ids are stored: more where no checkpoint lies as deep.
    """

    cache: KVLayers
    cached_len: int
    lease: Lease
    shared_len: int = 0


class Size(NamedTuple):
    """What something takes: bytes, and buffers of the device's."""

    num_bytes: int
    num_arrays: int


def size_of(buffer: Buffer) -> Size:
    """What a buffer takes."""
    return Size(buffer.num_bytes, sum(map(len, buffer.arrays)))


Checkpoints = Mapping[int, tuple[int, list[Any]]]  # depth -> rank, layers


@dataclass(frozen=True, slots=True)
class Match:
    """
    The longest path that a sequence shares with the tree.

    Args:
        nodes: all whole nodes on it, and the last one if partly shared.
        depth: tokens shared.
    """

    nodes: tuple[Node, ...]
    depth: int

    @property
    def plain_len(self) -> int:
        """
        Tokens whose KV is surely in full: what is computed behind them reads no other.

        What is borrowed counts as quantised: its sequence may pass the start at any
        step.
        """
        nodes = self.nodes
        worse = (n.start for n in nodes if n.buffer is None or not n.buffer.is_plain)
        return min([self.depth, *worse])

    def checkpoint_at_most(self, depth: int) -> Node | None:
        """The deepest node on the path with a checkpoint no deeper than `depth`."""
        for node in reversed(self.nodes):
            if node.checkpoint is not None and node.end <= depth:
                return node
        return None


class RadixTree:
    """
    A tree of id runs for each cache salt. Not thread-safe: the store locks.

    Equal ids under two salts are two paths, so that nothing which is asked under one
    of them tells what was asked under the other.

    Attributes:
        num_bytes: of all buffers and checkpoints; what is borrowed is not counted.
        num_arrays: the device's buffers that these lie in.
        leaves: nodes without children, in the order in which they became leaves.
        holders: nodes with a checkpoint.
    """

    def __init__(self) -> None:
        self.roots: dict[str, Node] = {}
        self.num_bytes = 0
        self.num_arrays = 0
        self.leaves: dict[Node, None] = {}
        self.holders: dict[Node, Size] = {}
        self._users: dict[Buffer, dict[Node, None]] = {}
        self._sizes: dict[Buffer, Size] = {}
        self._borrowed: dict[Lease, dict[Node, None]] = {}

    @property
    def buffers(self) -> Collection[Buffer]:
        """All buffers that some node lies in."""
        return self._users.keys()

    def users_of(self, buffer: Buffer) -> list[Node]:
        """The nodes that lie in a buffer."""
        return list(self._users.get(buffer, ()))

    def borrowed_nodes(self, lease: Lease) -> list[Node]:
        """The nodes whose KV is in a running sequence's own caches."""
        return list(self._borrowed.get(lease, ()))

    def store(self, node: Node, buffer: Buffer) -> None:
        """Let a node's KV be in a buffer from now on."""
        self._let_go(node)
        node.buffer, node.borrower = buffer, None
        self._take(node)

    def borrow(self, node: Node, lease: Lease) -> None:
        """Let a node's KV be in a running sequence's caches from now on."""
        self._let_go(node)
        node.buffer, node.borrower = None, lease
        self._take(node)

    def resize(
        self, buffer: Buffer, arrays: list[Leaves], start: int, end: int
    ) -> None:
        """Let a buffer hold the tokens [start, end) in other arrays."""
        buffer.arrays, buffer.start, buffer.length = arrays, start, end - start
        if buffer in self._sizes:
            self._uncount(self._sizes.pop(buffer))
            self._sizes[buffer] = self._counted(size_of(buffer))

    def keep_checkpoint(self, node: Node, layers: list[Any], rank: int) -> None:
        """Keep the state of the layers that cannot be cut, at a node's end."""
        self.drop_checkpoint(node)
        node.checkpoint, node.checkpoint_rank = layers, rank
        size = Size(node.checkpoint_bytes, len(arrays_of(layers)))
        self.holders[node] = self._counted(size)

    def drop_checkpoint(self, node: Node) -> None:
        """Keep it no more."""
        if node in self.holders:
            self._uncount(self.holders.pop(node))
        node.checkpoint = None

    def _enter(self, node: Node) -> None:
        self._take(node)
        if not node.children:
            self.leaves[node] = None
        if node.parent is not None:
            self.leaves.pop(node.parent, None)

    def _leave(self, node: Node) -> None:
        """Count a node no more; it keeps what it holds, for who dropped it."""
        self._let_go(node)
        if node in self.holders:
            self._uncount(self.holders.pop(node))
        self.leaves.pop(node, None)
        for reservation in node.reservations:
            reservation.nodes.remove(node)
        node.reservations.clear()

    def _take(self, node: Node) -> None:
        if node.borrower is not None:
            self._borrowed.setdefault(node.borrower, {})[node] = None
        if node.buffer is not None:
            if node.buffer not in self._users:
                self._users[node.buffer] = {}
                self._sizes[node.buffer] = self._counted(size_of(node.buffer))
            self._users[node.buffer][node] = None

    def _let_go(self, node: Node) -> None:
        if node.borrower is not None and node.borrower in self._borrowed:
            borrowed = self._borrowed[node.borrower]
            borrowed.pop(node, None)
            if not borrowed:
                del self._borrowed[node.borrower]
        if node.buffer is not None and node.buffer in self._users:
            users = self._users[node.buffer]
            users.pop(node, None)
            if not users:
                del self._users[node.buffer]
                self._uncount(self._sizes.pop(node.buffer))

    def _counted(self, size: "Size") -> "Size":
        self.num_bytes += size.num_bytes
        self.num_arrays += size.num_arrays
        return size

    def _uncount(self, size: "Size") -> None:
        self.num_bytes -= size.num_bytes
        self.num_arrays -= size.num_arrays

    def match(self, ids: tuple[int, ...], salt: str = "") -> Match:
        """Walk as far as the ids go."""
        nodes: list[Node] = []
        node, depth = self.roots.get(salt), 0
        while node is not None and depth < len(ids):
            child = node.children.get(ids[depth])
            if child is None:
                break
            shared = common_len(child.ids, ids, depth)
            nodes.append(child)
            depth += shared
            if shared < len(child.ids):
                break
            node = child
        return Match(tuple(nodes), depth)

    def node_ending_at(
        self, ids: tuple[int, ...], depth: int, salt: str = ""
    ) -> Node | None:
        """The node that ends exactly at a depth on a path, split out if need be."""
        match = self.match(ids[:depth], salt)
        if match.depth < depth or not match.nodes:
            return None
        last = match.nodes[-1]
        return last if last.end == depth else self.split(last, depth)

    def path_of(self, ids: tuple[int, ...], salt: str = "") -> Sequence[Node]:
        """The nodes of what is there of a path; the last one ends where that does."""
        match = self.match(ids, salt)
        if not match.nodes or match.nodes[-1].end == match.depth:
            return match.nodes
        return (*match.nodes[:-1], self.split(match.nodes[-1], match.depth))

    def split(self, node: Node, depth: int) -> Node:
        """Cut a node in two at a depth inside it; the upper part is returned."""
        at = depth - node.start
        assert 0 < at < len(node.ids)
        assert node.parent is not None
        upper = Node(
            node.ids[:at],
            node.start,
            node.parent,
            buffer=node.buffer,
            borrower=node.borrower,
            leases=set(node.leases),
            reservations=set(node.reservations),
            touched=node.touched,
            hits=node.hits,
            is_subagent=node.is_subagent,
            is_batch=node.is_batch,
            is_superseded=node.is_superseded,
            users=dict(node.users),
        )
        node.parent.children[upper.ids[0]] = upper
        node.ids, node.start, node.parent = node.ids[at:], depth, upper
        upper.children[node.ids[0]] = node
        self._enter(upper)
        for lease in node.leases:
            lease.nodes.append(upper)
        for reservation in node.reservations:
            reservation.nodes.append(upper)
        return upper

    def grow(
        self,
        ids: tuple[int, ...],
        salt: str = "",
        *,
        buffer: Buffer | None,
        borrower: Lease | None,
    ) -> Node | None:
        """
        Add the part of a path that is not there; None if all of it is.

        A node that the path leaves in its middle is split.
        """
        match = self.match(ids, salt)
        if match.depth == len(ids):
            return None
        parent = self.roots.setdefault(salt, Node((), 0, None))
        if match.nodes:
            last = match.nodes[-1]
            parent = last if last.end == match.depth else self.split(last, match.depth)
        node = Node(ids[match.depth :], match.depth, parent, buffer, borrower)
        parent.children[node.ids[0]] = node
        self._enter(node)
        return node

    def drop(self, node: Node) -> list[Node]:
        """
        Take a node and all below it out of the tree; those taken out.

        They know each other no more, or their arrays would wait for the collector.
        """
        assert node.parent is not None
        parent = node.parent
        parent.children.pop(node.ids[0], None)
        if parent.parent is None:
            self.roots = {s: root for s, root in self.roots.items() if root.children}
        elif not parent.children:
            self.leaves[parent] = None
        dropped = list(walk(node))
        for each in dropped:
            self._leave(each)
            each.parent, each.children = None, {}
        return dropped

    def disown(self, is_gone: Callable[[Conversation], bool] | None) -> set[Buffer]:
        """
        Drop the nodes of some conversations; what others go on from is theirs then.

        Args:
            is_gone: None: all nodes, whosever they are.
        Returns:
            The buffers of which others may hold a part.
        """
        if is_gone is None:
            for child in [c for r in self.roots.values() for c in r.children.values()]:
                self.drop(child)
            return set()
        buffers = set[Buffer]()
        for node in reversed(list(self.nodes())):  # children before their parents
            gone = [user for user in node.users if is_gone(user)]
            for user in gone:
                del node.users[user]
            if gone and not node.users:  # it is theirs who go on from it, if anyone
                for heir in [u for c in node.children.values() for u in c.users]:
                    node.used_by(heir)
            if node.users or node.children or not gone:
                continue
            if node.buffer is not None:
                buffers.add(node.buffer)
            self.drop(node)
        return buffers

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                yield from walk(child)


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it, without recursion: chains grow long."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.children.values())


def path_to(node: Node) -> list[Node]:
    """The nodes from below the root to this one."""
    path = [node]
    while path[-1].parent is not None and path[-1].parent.parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def common_len(run: tuple[int, ...], ids: tuple[int, ...], start: int) -> int:
    """Length of the common beginning of `run` and `ids[start:]`, by bisection."""
    low, high = 0, min(len(run), len(ids) - start)
    if run[:high] == ids[start : start + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[low:middle] == ids[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def is_path_of(path: Sequence[Node], ids: tuple[int, ...]) -> bool:
    """Whether the ids on a path are exactly the beginning of `ids`."""
    joined = tuple(token for node in path for token in node.ids)
    return joined == ids[: len(joined)] and path[-1].end == len(joined)
