"""
Planted faults: each must be caught by the checks, or the checks are worth nothing.

A fault is patched into the running program, a short run of fixed seeds is played, and
a violation must be reported; without a fault the same run reports none.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

import sidecar.kv.prefix_store as store_module
from sidecar.kv import kv_layers, leases, prefix_tree
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import path_to
from sidecar.memory.healing_store import HealingStore, TurnQuery
from sidecar.pipeline import prepare
from sidecar.pipeline.reuse import pinned_values, prompt_ids, prompt_variants
from testkit.oracle import Player
from testkit.oracle_rig import Rig, running_rig
from testkit.oracle_talk import Op, plan
from testkit.planted import patched

MakeRig = Callable[[str], Rig]
_LENGTH = 8
_MAX_SEQUENCES = 60


@pytest.fixture(scope="module")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRig]:
    rigs: dict[str, Rig] = {}
    folder = tmp_path_factory.mktemp("mutations")
    with ExitStack() as stack:

        def make(kind: str) -> Rig:
            if kind not in rigs:
                rigs[kind] = stack.enter_context(running_rig(folder, kind))
            return rigs[kind]

        yield make


def caught(rig: Rig, ops: Sequence[str]) -> str:
    """The invariant that the first violation names; "" if a run shows none."""
    for number in range(_MAX_SEQUENCES):
        player = Player(rig)
        if player.play(_only(plan(f"mutants/{number}", _LENGTH), ops)):
            return player.found[0].invariant
    return ""


def _only(ops: list[Op], names: Sequence[str]) -> list[Op]:
    """Other ops become plain requests and these: what shows a fault comes sooner."""
    instead = ["append", *names]
    return [
        op if op.name in names else Op(instead[number % len(instead)], op.seed)
        for number, op in enumerate(ops)
    ]


# The faults


def a_copy_cut_off_by_one() -> AbstractContextManager[None]:
    def make(view: Any) -> Any:
        def shifted(arrays: Any, start: int, end: int) -> Any:
            by = 1 if all(end < a.shape[-2] for a in arrays) else 0
            return view(arrays, start + by, end + by)

        return shifted

    return patched(kv_layers, "view", make)


def a_cache_one_token_too_deep() -> AbstractContextManager[None]:
    """What is lent holds one token more than was asked for."""

    def make(rebuild: Any) -> Any:
        def deeper(fresh: Any, arrays: Any, checkpoint: Any, offset: int) -> None:
            rebuild(fresh, arrays, checkpoint, offset + 1)

        return deeper

    return patched(kv_layers, "rebuild", make)


def a_row_kept_from_the_wrong_depth() -> AbstractContextManager[None]:
    def make(claim: Any) -> Any:
        def late(arrays: Any, start: int, end: int) -> Any:
            buffer = claim(arrays, start, end)
            buffer.arrays = [[mx.roll(a, 1, -2) for a in run] for run in buffer.arrays]
            return buffer

        return late

    return patched(store_module, "claim", make)


def a_match_one_token_too_long() -> AbstractContextManager[None]:
    def make(common_len: Any) -> Any:
        def longer(run: Any, ids: Any, start: int) -> int:
            found = common_len(run, ids, start)
            return min(found + (found > 0), len(run), len(ids) - start)

        return longer

    return patched(prefix_tree, "common_len", make)


def the_kv_of_another_path() -> AbstractContextManager[None]:
    def make(take: Any) -> Any:
        def other(self: PrefixStore, path: Any, lease: Any) -> Any:
            depth = path[-1].end
            for node in self._tree.nodes():
                strange = path_to(node)
                if node.end >= depth and path[-1] not in strange:
                    return [
                        [a[..., : depth + 1, :] for a in run]
                        for run in leases.copy_path(strange)
                    ]
            return take(self, path, lease)

        return other

    return patched(PrefixStore, "_take", make)


@contextlib.contextmanager
def a_checkpoint_of_another_branch() -> Iterator[None]:
    """Each gets the state that the one before it should have had."""
    before: list[Any] = []

    def make(take: Any) -> Any:
        def swapped(cache: Any) -> Any:
            before.append(take(cache))
            return before[-2] if len(before) > 1 else before[-1]

        return swapped

    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("sidecar.engine") and hasattr(module, "take_checkpoint")
    ]
    with ExitStack() as stack:
        for module in users:
            stack.enter_context(patched(module, "take_checkpoint", make))
        yield


def a_checkpoint_that_is_not_copied() -> AbstractContextManager[None]:
    """Whoever resumes from it advances the stored one."""

    class NoCopy:
        @staticmethod
        def deepcopy(item: Any) -> Any:
            return item

    return patched(kv_layers, "copy", lambda _: NoCopy)


def a_cut_off_by_one() -> AbstractContextManager[None]:
    """Of a stretch that gets arrays of its own."""

    def make(cut: Any) -> Any:
        def shifted(arrays: Any, start: int, end: int) -> Any:
            by = 1 if start else 0
            return cut(arrays, start - by, end - by)

        return shifted

    return patched(kv_layers, "cut", make)


def a_failed_row_that_keeps_its_loan() -> AbstractContextManager[None]:
    def make(_abandon: Any) -> Any:
        def release(self: PrefixStore, lease: Any) -> None:
            self._release(lease)

        return release

    return patched(PrefixStore, "abandon", make)


def a_pinned_value_not_restated() -> AbstractContextManager[None]:
    return patched(pinned_values, "_to_restate", lambda _: lambda *_: ())


def a_value_of_another_thread() -> AbstractContextManager[None]:
    return patched(
        pinned_values, "sharing_rule", lambda _: lambda *_, **__: lambda *_: True
    )


def a_span_pinned_in_a_message_that_grew() -> AbstractContextManager[None]:
    """Found by the fuzzer once: the end of the message has to match as well."""

    def make(canonical_ids: Any) -> Any:
        def earlier(*args: Any) -> Any:
            found = canonical_ids(*args)
            settled = {key: depth - 1 for key, depth in found.settled.items()}
            return prompt_ids.Canonical(found.ids, settled)

        return earlier

    return patched(prepare, "canonical_ids", make)


def a_note_with_another_value() -> AbstractContextManager[None]:
    def make(write: Any) -> Any:
        def wrong(restated: Any, roles: Any) -> Any:
            note = write(restated, roles)
            return replace(note, text=note.text.replace(restated[0].value, "x"))

        return wrong

    return patched(prompt_variants, "write_note", make)


def the_words_of_another_turn() -> AbstractContextManager[None]:
    def make(find: Any) -> Any:
        def latest(self: HealingStore, *args: Any, **kwargs: Any) -> Any:
            known = [c for turns in self._turns.values() for c in turns]
            return known[-1] if known else find(self, *args, **kwargs)

        return latest

    return patched(HealingStore, "find", make)


def a_turn_of_another_nameless_chat() -> AbstractContextManager[None]:
    return patched(TurnQuery, "owns", lambda _: lambda *_: True)


@dataclass(frozen=True)
class Fault:
    """
    Args:
    plant: puts it in. kinds: models that show it. by: invariants that may catch it.
    ops: what provokes it.
    """

    plant: Callable[[], AbstractContextManager[None]]
    by: str
    kinds: tuple[str, ...] = ("dense",)
    ops: tuple[str, ...] = ("branch", "pair", "edit", "retry")


FAULTS = (
    Fault(a_copy_cut_off_by_one, "III", ("dense", "sliding")),
    Fault(a_cache_one_token_too_deep, "III"),
    Fault(a_row_kept_from_the_wrong_depth, "III", ("dense", "hybrid", "sliding")),
    Fault(a_match_one_token_too_long, "I"),
    Fault(the_kv_of_another_path, "III", ("dense", "hybrid")),
    Fault(a_checkpoint_of_another_branch, "III", ("hybrid",)),
    Fault(a_checkpoint_that_is_not_copied, "III", ("hybrid",)),
    Fault(a_cut_off_by_one, "III", ("dense", "hybrid", "sliding")),
    Fault(a_failed_row_that_keeps_its_loan, "integrity", ops=("crash",)),
    Fault(a_pinned_value_not_restated, "II", ops=("volatile",)),
    Fault(a_value_of_another_thread, "II", ops=("new",)),
    Fault(a_span_pinned_in_a_message_that_grew, "II", ops=("edit", "volatile")),
    Fault(a_note_with_another_value, "II", ops=("volatile",)),
    Fault(the_words_of_another_turn, "II"),
    Fault(a_turn_of_another_nameless_chat, "II", ops=("new",)),
)
CASES = [
    pytest.param(fault, kind, id=f"{fault.plant.__name__}-{kind}")
    for fault in FAULTS
    for kind in fault.kinds
]


@pytest.mark.parametrize(("fault", "kind"), CASES)
def test_a_planted_fault_is_caught(fault: Fault, kind: str, make_rig: MakeRig) -> None:
    rig = make_rig(kind)
    with fault.plant():
        assert caught(rig, fault.ops) == fault.by
        rig.forget()


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_without_a_fault_nothing_is_reported(kind: str, make_rig: MakeRig) -> None:
    rig = make_rig(kind)
    for number in range(4):
        player = Player(rig)
        assert player.play(plan(f"mutants/{number}", _LENGTH)) == []
