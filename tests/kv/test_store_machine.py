"""
The KV store under any order of events; every byte of it is checked after each.

The KV is told KV: whatever a node, a row or a checkpoint holds says what it was
computed from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sidecar.core.prompt import ModelIds
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv import kv_layers
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.kv.kv_layers import KVLayers
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import Node, path_to
from testkit.sequences import Running, joined, owned, some_ids
from testkit.told_kv import digests, faults, leaf_faults

TinyModel = Callable[[str], LoadedModel]
SEGMENTS = [some_ids(n, length) for n, length in enumerate((5, 17, 30, 70))]
TIGHT = Limits(60_000, 5, 0, 4, 7)
MAX_RUNNING = 3
TAIL = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@dataclass(frozen=True)
class How:
    """What becomes of a request; stops are depths with the rank of a checkpoint."""

    end: str
    is_subagent: bool
    stops: dict[int, int]


HOW = st.builds(
    How,
    st.sampled_from(["running", "running", "answered", "answered", "answered",
                     "cancelled", "failed"]),
    st.booleans(),
    st.dictionaries(st.integers(1, 200), st.integers(0, 3), max_size=5),
)  # fmt: skip


class StoreMachine(RuleBasedStateMachine):
    """Requests come, share, run side by side, end well or badly; things are evicted."""

    new_cache: ClassVar[Callable[[], KVLayers]]
    limits: ClassVar[Limits]

    @initialize()
    def begin(self) -> None:
        self.store = PrefixStore(KVBudget(self.limits), type(self).new_cache)
        self.running: list[Running] = []
        self.computed: list[ModelIds] = []  # by anything, ever
        self.is_lossless = self.limits is not TIGHT  # until something fails

    # What comes

    @precondition(lambda self: len(self.running) < MAX_RUNNING)
    @rule(parts=st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3),
          tail=TAIL, how=HOW)  # fmt: skip
    def ask(self, parts: list[ModelIds], tail: list[int], how: "How") -> None:
        """A prompt of stretches that others have as well."""
        self._start(joined(*parts, tail), how)

    @precondition(lambda self: len(self.running) < MAX_RUNNING and self.computed)
    @rule(data=st.data(), tail=TAIL, how=HOW)
    def ask_again(self, data: Any, tail: list[int], how: "How") -> None:
        """The next turn of something, or a branch of it, or the same once more."""
        known = data.draw(st.sampled_from(self.computed[-8:]))
        back = data.draw(st.sampled_from([0, 0, 0, 1, 2, 9, 33]))
        self._start(joined(known[: max(1, len(known) - back)], tail), how)

    def _start(self, prompt: ModelIds, how: "How") -> None:
        """Restore and prefill, as far as it comes; maybe it is answered at once."""
        said = self.store.match_len(prompt)
        sequence = Running(self.store, prompt, owned("s", is_subagent=how.is_subagent))
        assert sequence.cached_len == said
        shared = max((_common(c, prompt) for c in self.computed), default=0)
        assert said <= min(shared, len(prompt) - 1)
        if self.is_lossless and not self.store.needs_checkpoints:
            assert said == min(shared, len(prompt) - 1)
        assert faults(sequence.cache, prompt[:said]) == []
        self.running.append(sequence)
        for depth, rank in sorted(how.stops.items()):
            if sequence.done < depth < len(prompt) - 1:
                sequence.advance(depth, rank)
                if how.end == "cancelled":
                    self._end(sequence).finish()
                    return
                if how.end == "failed":
                    self._end(sequence).fail()
                    self.is_lossless = False
                    return
        sequence.prefill()
        self._note(sequence)
        if how.end == "answered":
            self._decode(sequence, [3, 4])
            self._end(sequence).finish()

    # What runs

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def decode(self, data: Any, ids: list[int]) -> None:
        self._decode(data.draw(st.sampled_from(self.running)), ids)

    def _decode(self, sequence: Running, ids: list[int]) -> None:
        sequence.ids = joined(sequence.ids, ids)
        for end in range(sequence.done + 1, len(sequence.ids) + 1):
            sequence.advance(end)

    # How it ends

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        self._end(data.draw(st.sampled_from(self.running))).finish()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        """Nothing of the answer is kept."""
        sequence = data.draw(st.sampled_from(self.running))
        sequence.ids = sequence.ids[: len(sequence.prompt)]
        self._end(sequence).end_at(min(sequence.done, len(sequence.prompt)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        self._end(data.draw(st.sampled_from(self.running))).fail()
        self.is_lossless = False

    @precondition(lambda self: self.computed)
    @rule()
    def clear(self) -> None:
        self.store.forget()
        self.is_lossless = False

    @precondition(lambda self: self.computed)
    @rule(share=st.sampled_from([0.3, 1.0]))
    def press(self, share: float) -> None:
        """Memory runs short; nothing stored is held back by what runs."""
        before = self.store.num_bytes
        self.store.budget.evict_bytes(int(share * before))
        assert self.store.num_bytes <= before - int(share * before)
        self.is_lossless = False

    def _end(self, sequence: Running) -> Running:
        self.running.remove(sequence)
        self._note(sequence)
        return sequence

    def _note(self, sequence: Running) -> None:
        """From now on others may reuse it."""
        self.computed.append(ModelIds(sequence.ids[: sequence.done]))

    # What is always true

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "store"):
            assert self.store.check_integrity() == []
            assert list(tree_faults(self.store, type(self).new_cache())) == []

    @invariant()
    def rows_are_exact(self) -> None:
        for sequence in getattr(self, "running", ()):
            assert faults(sequence.cache, sequence.ids[: sequence.done]) == []

    @invariant()
    def is_within_limits(self) -> None:
        if getattr(self, "running", True):
            return
        nodes = list(self.store._tree.nodes())
        held = [n for n in nodes if n.checkpoint is not None]
        assert self.store.num_bytes <= self.limits.max_bytes
        assert sum(not n.children for n in nodes) <= self.limits.max_leaves
        assert len(held) <= self.limits.checkpoints_in_all
        share = sum(n.checkpoint_bytes for n in held)
        assert share <= self.limits.max_bytes // 4
        assert not any(n.leases or n.borrower for n in nodes)


def tree_faults(store: PrefixStore, fresh: KVLayers) -> list[str]:
    """What in a store is not the KV of the ids it stands under, and wrong sums."""
    found = []
    buffers = set()
    for node in store._tree.nodes():
        ids = sum((n.ids for n in path_to(node)), ())
        found += [f"{node.start}..{node.end}: {f}" for f in _node_faults(node, ids)]
        buffers |= {node.buffer} - {None}
        for lease in node.leases:
            if lease.is_over or node not in lease.nodes:
                found.append(f"{node.start}..{node.end}: a lease that is none")
        found += _checkpoint_faults(node, ids, fresh)
    held = sum(kv_layers.nbytes(b.arrays) for b in buffers)
    held += sum(n.checkpoint_bytes for n in store._tree.nodes())
    if held != store.num_bytes:
        found.append(f"{held} bytes, not {store.num_bytes}")
    return found


def _node_faults(node: Node, ids: Sequence[int]) -> list[str]:
    if node.borrower is not None:
        assert node.borrower.live is not None
        cache, start = node.borrower.live(), 0
        arrays = kv_layers.sliceable_leaves(cache)
    else:
        assert node.buffer is not None
        arrays, start = node.buffer.arrays, node.buffer.start
    told = digests(ids)[node.start :]
    found = []
    for leaves in arrays:
        view = kv_layers.view(leaves, node.start - start, node.end - start)
        keys, values = (np.array(a)[0, 0, :, 0] for a in view)
        number = int(values[0] - keys[0]) - 1
        found += leaf_faults(None, view, told, number)
    return found


def _checkpoint_faults(node: Node, ids: Sequence[int], fresh: KVLayers) -> list[str]:
    if node.checkpoint is None:
        return []
    arrays = [[] for a in kv_layers.atoms(fresh) if kv_layers.is_sliceable_atom(a)]
    kept = iter(node.checkpoint)
    cache = []
    for atom in kv_layers.atoms(fresh):
        cache.append(atom if kv_layers.is_sliceable_atom(atom) else next(kept))
    assert len(list(kept)) == 0
    wrong = faults(cache, ids)
    sliceable = len(arrays)  # these are empty here, and say so
    return wrong if len(wrong) > sliceable else []


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
@pytest.mark.parametrize("size", ["roomy", "tight"])
def test_any_order_of_events_keeps_the_store_exact(
    kind: str, size: str, tiny_model: TinyModel
) -> None:
    """Dense and roomy, all that can be reused is; else at most that."""
    model = tiny_model(kind)

    class Machine(StoreMachine):
        new_cache = staticmethod(model.new_cache)
        limits = TIGHT if size == "tight" else Limits(1 << 30, 1 << 30, 0, 999, 999)

    options = settings(max_examples=40, stateful_step_count=30)
    gpu_thread().call(lambda: run_state_machine_as_test(Machine, settings=options))
