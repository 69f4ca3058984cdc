"""
The tree of ids: match, grow, split, drop. No arrays are computed here.

Children of a node begin with different ids; the depth of a node's end is the number
of ids on the path to it, always.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sidecar.kv.node import Buffer, Lease, Node


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
    """

    def __init__(self) -> None:
        self.roots: dict[str, Node] = {}

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
            lent_to=node.lent_to,
            leases=set(node.leases),
            touched=node.touched,
            hits=node.hits,
            is_guest=node.is_guest,
            is_superseded=node.is_superseded,
            session=node.session,
        )
        node.parent.children[upper.ids[0]] = upper
        node.ids, node.start, node.parent = node.ids[at:], depth, upper
        upper.children[node.ids[0]] = node
        for lease in node.leases:
            lease.nodes.append(upper)
        return upper

    def grow(
        self,
        ids: tuple[int, ...],
        salt: str = "",
        *,
        buffer: Buffer | None,
        lent_to: Lease | None,
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
        node = Node(ids[match.depth :], match.depth, parent, buffer, lent_to)
        parent.children[node.ids[0]] = node
        return node

    def drop(self, node: Node) -> list[Node]:
        """
        Take a node and all below it out of the tree; those taken out.

        They know each other no more, or their arrays would wait for the collector.
        """
        assert node.parent is not None
        node.parent.children.pop(node.ids[0], None)
        if node.parent.parent is None:
            self.roots = {s: root for s, root in self.roots.items() if root.children}
        dropped = list(walk(node))
        for each in dropped:
            each.parent, each.children = None, {}
        return dropped

    def clear(self) -> None:
        """Drop all nodes."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                self.drop(child)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                yield from walk(child)

    def leaves(self) -> list[Node]:
        """Nodes without children."""
        return [node for node in self.nodes() if not node.children]


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
