"""Takes conversations off the disk: all of a model's, or those of a session or key."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sidecar.core.forgetting import Whose
from sidecar.kv.disk.durable_files import clear_broken_off
from sidecar.kv.disk.slot import Slot, scope_of
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.kv.disk.tensor_file import Damaged


def forget(folder: SlotFolder, whose: Whose | None) -> tuple[int, int]:
    """
    Delete slots of a model; how many, and their bytes.

    Args:
        whose: conversations that are forgotten; None: all, what is being written too.
    Raises:
        OSError: they cannot be.
    """
    return forget_all(folder) if whose is None else forget_some(folder, whose)


def forget_all(folder: SlotFolder) -> tuple[int, int]:
    """
    Delete all slots of a model, what is being written too; how many, and their bytes.

    Raises:
        OSError: they cannot be.
    """
    num_bytes = 0
    with folder.locked():
        numbers = folder.numbers()
        num_bytes = sum(folder.delete(number) for number in folder.files())
        clear_broken_off(folder.path, math.inf)
    return len(numbers), num_bytes


def forget_some(folder: SlotFolder, whose: Whose) -> tuple[int, int]:
    """
    Delete the slots of some conversations; how many, and their bytes.

    A run that others go on from at its end keeps its KV and ids, which are theirs then,
    and loses what was said in these conversations. Where others go on from within a run
    only, its rest is nobody's but theirs who are forgotten: it goes, with what others
    have behind it, for a slot is never cut. They write that again when they are used.

    Raises:
        OSError: they cannot be.
    """
    num_slots = num_bytes = 0
    below: dict[str, list[Slot]] = {}  # uid of a slot -> those that go on from it
    with folder.locked():
        for number in reversed(folder.numbers()):  # a parent's number is lower
            slot = None
            with contextlib.suppress(Damaged, FileNotFoundError):
                slot = folder.read(number)
            if slot is None:
                continue
            is_gone = whose.covers(slot.owner)
            heirs = [other for other in below.get(slot.uid, ()) if other.at == slot.end]
            if is_gone and not heirs:
                gone = _chain(slot, below)
                num_bytes += sum(folder.delete(other.number) for other in gone)
                num_slots += len(gone)
                continue
            owner = heirs[0].meta["owner"] if is_gone else slot.meta["owner"]
            slot = _strip(folder, slot, whose, owner)
            if slot.parent is not None:
                below.setdefault(slot.parent[1], []).append(slot)
    return num_slots, num_bytes


def _chain(slot: Slot, below: Mapping[str, Sequence[Slot]]) -> list[Slot]:
    """A slot and all that go on from it, those first that none goes on from."""
    found, todo = list[Slot](), [slot]
    while todo:
        found.append(todo.pop())
        todo.extend(below.get(found[-1].uid, ()))
    return found[::-1]


def _strip(folder: SlotFolder, slot: Slot, whose: Whose, owner: Any) -> Slot:
    """Let a slot say nothing of some conversations; what it is then."""
    before = slot.meta["kept"]
    kept = [told for told in before if not whose.covers(scope_of(told["scope"]))]
    if len(kept) == len(before) and owner == slot.meta["owner"]:
        return slot
    canonical = slot.canonical
    if before[-1:] != kept[-1:]:  # what the last one's prompt looked like goes with it
        kept, canonical = list(map(_without_lineage, kept)), np.empty(0, np.uint32)
    folder.retell(slot, {"kept": kept, "owner": owner}, canonical)
    return folder.read(slot.number)


def _without_lineage(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name != "lineage"}
