"""Takes conversations off the disk: all of a model's, or those of a session or key."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sidecar.core.forgetting import Whose
from sidecar.kv.disk.durable_files import clear_broken_off
from sidecar.kv.disk.slot import Slot, scope_of
from sidecar.kv.disk.slot_cut import cut_kv
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.kv.disk.tensor_file import Damaged

logger = logging.getLogger(__name__)

_NOTHING = np.empty(0, np.uint32)


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

    What others go on from keeps its KV and ids up to there, which are theirs then, and
    loses what was said in these conversations.

    Raises:
        OSError: they cannot be.
    """
    gone, num_bytes = 0, 0
    failed: OSError | None = None
    below: dict[str, list[Slot]] = {}  # uid of a slot -> those that go on from it
    with folder.locked():
        clear_broken_off(folder.path, math.inf)
        for number in sorted(folder.files(), reverse=True):  # a parent's is lower
            try:
                slot = folder.read(number)
            except (Damaged, FileNotFoundError):  # nobody knows whose it was
                num_bytes += folder.delete(number)
                gone += 1
                continue
            except OSError as error:
                failed = error
                continue
            left = _keep(folder, slot, whose, below.get(slot.uid, []))
            if left is None:
                for other in _chain(slot, below):
                    num_bytes += folder.delete(other.number)
                    gone += 1
            elif left.parent is not None:
                below.setdefault(left.parent[1], []).append(left)
    if failed is not None:
        raise failed
    return gone, num_bytes


def _keep(
    folder: SlotFolder, slot: Slot, whose: Whose, heirs: Sequence[Slot]
) -> Slot | None:
    """What stays of a slot for those who go on from it; None: nothing."""
    try:
        if not whose.covers(slot.owner):
            return _strip(folder, slot, whose, slot.meta["owner"])
        if not heirs:
            return None
        heir = max(heirs, key=lambda other: other.at)
        if heir.at == slot.end:
            return _strip(folder, slot, whose, heir.meta["owner"])
        return _shorten(folder, slot, whose, heir)
    except (Damaged, OSError) as error:  # a full disk: better nothing than these words
        logger.warning("KV slot %d goes whole: %s", slot.number, error)
        return None


def _shorten(folder: SlotFolder, slot: Slot, whose: Whose, heir: Slot) -> Slot:
    """Keep what stands before an heir."""
    draft, told = cut_kv(folder, slot, heir.at)
    kept = [_without_lineage(t) for t in _others(slot, whose)]
    words = {"kept": kept, "owner": heir.meta["owner"], "keeps_end": True}
    ids = slot.ids[: heir.at - slot.at]
    folder.retell(slot, {**told, **words}, (ids, _NOTHING), draft)
    return folder.read(slot.number)


def _chain(slot: Slot, below: Mapping[str, Sequence[Slot]]) -> list[Slot]:
    """A slot and all that go on from it, those first that none goes on from."""
    found, todo = list[Slot](), [slot]
    while todo:
        found.append(todo.pop())
        todo.extend(below.get(found[-1].uid, ()))
    return found[::-1]


def _strip(folder: SlotFolder, slot: Slot, whose: Whose, owner: Any) -> Slot:
    """Let a slot say nothing of some conversations; what it is then."""
    before, kept = slot.meta["kept"], _others(slot, whose)
    if len(kept) == len(before) and owner == slot.meta["owner"]:
        return slot
    canonical = slot.canonical
    if before[-1:] != kept[-1:]:  # what the last one's prompt looked like goes with it
        kept, canonical = list(map(_without_lineage, kept)), _NOTHING
    folder.retell(slot, {"kept": kept, "owner": owner}, (slot.ids, canonical))
    return folder.read(slot.number)


def _others(slot: Slot, whose: Whose) -> list[Mapping[str, Any]]:
    """What was said in a slot, but for some conversations."""
    said: list[Mapping[str, Any]] = slot.meta["kept"]
    return [told for told in said if not whose.covers(scope_of(told["scope"]))]


def _without_lineage(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name != "lineage"}
