"""The tree of ids: match, grow, split, drop, against a set of all beginnings."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from sidecar.core.conversation import Conversation
from sidecar.kv.prefix_tree import Buffer, Lease, Node, RadixTree, common_len, path_to

Ids = tuple[int, ...]
# Few ids, so that paths share much and part in the middle of a node.
IDS = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def grown(tree: RadixTree, *paths: Ids) -> list[Node | None]:
    return [tree.grow(ids, buffer=Buffer([], 0, 0), borrower=None) for ids in paths]


def told(tree: RadixTree) -> list[tuple[Ids, int]]:
    """Runs of the nodes with their depths, in no particular order."""
    return sorted((node.ids, node.start) for node in tree.nodes())


def test_an_empty_tree_matches_nothing() -> None:
    assert RadixTree().match((1, 2)).depth == 0
    assert RadixTree().node_ending_at((1, 2), 1) is None
    assert list(RadixTree().leaves) == []


def test_a_path_that_leaves_a_node_in_its_middle_splits_it() -> None:
    tree = RadixTree()
    (first,) = grown(tree, (1, 2, 3, 4))
    (second,) = grown(tree, (1, 2, 9))
    assert told(tree) == [((1, 2), 0), ((3, 4), 2), ((9,), 2)]
    assert first is not None
    assert first.ids == (3, 4)  # the lower part stays the node that was
    assert second is not None
    assert second.parent is first.parent


def test_growing_what_is_there_adds_nothing() -> None:
    """Neither the same path nor a beginning of it; a longer one only its tail."""
    tree = RadixTree()
    grown(tree, (1, 2, 3))
    assert grown(tree, (1, 2, 3), (1, 2), ()) == [None, None, None]
    (tail,) = grown(tree, (1, 2, 3, 4))
    assert tail is not None
    assert (tail.ids, tail.start) == ((4,), 3)
    assert len(list(tree.nodes())) == 2


def test_a_match_names_the_node_it_ends_in() -> None:
    tree = RadixTree()
    grown(tree, (1, 2, 3, 4), (1, 2, 9))
    match = tree.match((1, 2, 3, 7))
    assert match.depth == 3
    assert [node.ids for node in match.nodes] == [(1, 2), (3, 4)]


def test_a_split_keeps_the_checkpoint_below_and_the_rest_on_both() -> None:
    """A checkpoint is the state at the node's end, and nowhere else."""
    tree, lease = RadixTree(), Lease()
    node = tree.grow((1, 2, 3, 4), buffer=None, borrower=lease)
    assert node is not None
    node.checkpoint, node.touched, node.hits = ["state"], 5.0, 3
    node.used_by(Conversation(None, "s", "t"))
    node.is_subagent = True
    node.leases.add(lease)
    lease.nodes.append(node)
    upper = tree.split(node, 1)
    assert upper.checkpoint is None
    assert node.checkpoint == ["state"]
    for part in (upper, node):
        assert part.borrower is lease
        assert part.leases == {lease}
        assert (part.touched, part.hits, part.session) == (5.0, 3, (None, "s"))
        assert part.is_subagent
    assert set(lease.nodes) == {upper, node}
    upper.leases.clear()
    assert node.leases == {lease}


def test_the_deepest_checkpoint_no_deeper_than_asked_is_found() -> None:
    tree = RadixTree()
    for end in (2, 4, 6):
        (node,) = grown(tree, (1, 2, 3, 4, 5, 6)[:end])
        assert node is not None
        node.checkpoint = [end]
    match = tree.match((1, 2, 3, 4, 5, 9))
    for depth, wanted in ((5, 4), (4, 4), (3, 2), (2, 2), (1, None)):
        found = match.checkpoint_at_most(depth)
        assert (found and found.end) == wanted


def test_chains_of_any_length_are_walked() -> None:
    """One node per token, as checkpoints make them, is no deep recursion."""
    tree = RadixTree()
    path: Ids = ()
    for i in range(3000):
        path = (*path, i)
        grown(tree, path)
    assert tree.match(path).depth == 3000
    (leaf,) = tree.leaves
    assert sum((node.ids for node in path_to(leaf)), ()) == path
    assert len(tree.drop(path_to(leaf)[0])) == 3000


@given(IDS, IDS, IDS)
def test_the_common_length_is_what_counting_says(before: Ids, a: Ids, b: Ids) -> None:
    counted = 0
    while counted < min(len(a), len(b)) and a[counted] == b[counted]:
        counted += 1
    assert common_len(a, before + b, len(before)) == counted


def test_equal_ids_under_two_salts_are_two_paths() -> None:
    """What is grown, split and dropped under one is not seen under the other."""
    tree = RadixTree()
    for salt in ("one", "other"):
        tree.grow((1, 2, 3), salt, buffer=Buffer([], 0, 3), borrower=None)
    tree.grow((1, 2, 4), "one", buffer=Buffer([], 0, 3), borrower=None)
    assert tree.match((1, 2, 4), "one").depth == 3
    assert tree.match((1, 2, 4), "other").depth == 2
    assert tree.match((1, 2, 4)).depth == 0
    assert tree.node_ending_at((1, 2, 3), 2, "none of these") is None
    tree.drop(tree.match((1,), "one").nodes[0])
    assert list(tree.roots) == ["other"]
    assert sum(len(node.ids) for node in tree.nodes()) == 3


class TreeMachine(RuleBasedStateMachine):
    """A tree beside the plain set of all stored beginnings."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.stored: set[Ids] = set()

    def _longest(self, ids: Ids) -> int:
        return max(n for n in range(len(ids) + 1) if n == 0 or ids[:n] in self.stored)

    @rule(ids=IDS)
    def grow(self, ids: Ids) -> None:
        known = self._longest(ids)
        (node,) = grown(self.tree, ids)
        if known == len(ids):
            assert node is None
        else:
            assert node is not None
            assert (node.ids, node.start) == (ids[known:], known)
        self.stored |= {ids[:n] for n in range(1, len(ids) + 1)}

    @rule(ids=IDS)
    def match(self, ids: Ids) -> None:
        match = self.tree.match(ids)
        assert match.depth == self._longest(ids)
        path = sum((node.ids for node in match.nodes), ())
        assert path[: match.depth] == ids[: match.depth]
        assert all(node.start < match.depth for node in match.nodes)

    @rule(ids=IDS, data=st.data())
    def find_an_end(self, ids: Ids, data: Any) -> None:
        """A node that ends at a depth is made by a split, if the path is there."""
        depth = data.draw(st.integers(1, len(ids) or 1))
        node = self.tree.node_ending_at(ids, depth)
        if depth > len(ids) or ids[:depth] not in self.stored:
            assert node is None
        else:
            assert node is not None
            assert node.end == depth
            assert sum((n.ids for n in path_to(node)), ()) == ids[:depth]

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        node = data.draw(st.sampled_from(sorted(self.tree.nodes(), key=_place)))
        path = sum((n.ids for n in path_to(node)), ())
        gone = {i for i in self.stored if i[: node.start + 1] == path[: node.start + 1]}
        dropped = self.tree.drop(node)
        assert sum(len(n.ids) for n in dropped) == len(gone)
        self.stored -= gone

    @invariant()
    def holds_what_was_stored(self) -> None:
        beginnings = set()
        for node in self.tree.nodes():
            path = sum((n.ids for n in path_to(node)), ())
            assert len(path) == node.end
            beginnings |= {path[:n] for n in range(node.start + 1, node.end + 1)}
        assert beginnings == self.stored
        assert sum(len(n.ids) for n in self.tree.nodes()) == len(self.stored)

    @invariant()
    def is_well_formed(self) -> None:
        parents = [*self.tree.roots.values(), *self.tree.nodes()]
        for parent in parents:
            for first, child in parent.children.items():
                assert child.ids
                assert child.ids[0] == first
                assert child.parent is parent
                assert child.start == parent.end
        leaves = [n for n in self.tree.nodes() if not n.children]
        assert sorted(map(id, self.tree.leaves)) == sorted(map(id, leaves))


def _place(node: Node) -> tuple[Ids, ...]:
    return tuple(n.ids for n in path_to(node))


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=25)
