"""Takes conversations off the disk: all of a model's, or those of a session or key."""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from sidecar.core.conversation import ForgetFilter, conversation_of
from sidecar.kv.disk.cache_form import RUN_FORMAT, metadata_of, scalar_array, to_numpy
from sidecar.kv.disk.durable_files import (
    MALFORMED,
    clear_broken_off,
    make_durable,
    open_private,
)
from sidecar.kv.disk.slot import STATE_GONE, STATELESS, Slot, sum_of_bytes
from sidecar.kv.disk.slot_folder import Draft, SlotFolder
from sidecar.kv.disk.tensor_file import (
    Damaged,
    Header,
    TensorSpec,
    read_header,
    read_tensor,
    write_tensors,
)

logger = logging.getLogger(__name__)

_NOTHING = np.empty(0, np.uint32)
_Claim = tuple[int, Any]  # a depth, and a conversation as JSON


def forget(folder: SlotFolder, forget_filter: ForgetFilter | None) -> tuple[int, int]:
    """
    Delete slots of a model; how many, and their bytes.

    Args:
        forget_filter: conversations that are forgotten; None: all, what is being
            written too.
    Raises:
        OSError: they cannot be.
    """
    return (
        forget_all(folder)
        if forget_filter is None
        else forget_some(folder, forget_filter)
    )


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


def forget_some(folder: SlotFolder, forget_filter: ForgetFilter) -> tuple[int, int]:
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
    spoken: dict[str, list[_Claim]] = {}  # the same -> by what goes and was others' too
    with folder.locked():
        clear_broken_off(folder.path, math.inf)
        for number in sorted(folder.files(), reverse=True):  # a parent's is lower
            try:
                slot = folder.read(number)
            except (Damaged, FileNotFoundError):  # of nobody knows which conversation
                num_bytes += folder.delete(number)
                gone += 1
                continue
            except OSError as error:
                failed = error
                continue
            heirs, claims = below.get(slot.uid, []), spoken.get(slot.uid, [])
            left = _keep(folder, slot, forget_filter, heirs, claims)
            if left is None:
                if slot.parent is not None:
                    said = [*claims, *_spoken(slot, forget_filter)]
                    before = [(min(depth, slot.at), scope) for depth, scope in said]
                    spoken.setdefault(slot.parent[1], []).extend(before)
                for other in _chain(slot, below):
                    num_bytes += folder.delete(other.number)
                    gone += 1
            elif left.parent is not None:
                below.setdefault(left.parent[1], []).append(left)
    if failed is not None:
        raise failed
    return gone, num_bytes


def _keep(
    folder: SlotFolder,
    slot: Slot,
    forget_filter: ForgetFilter,
    heirs: Sequence[Slot],
    spoken: Sequence[_Claim],
) -> Slot | None:
    """What stays of a slot for those who go on from it; None: nothing."""
    try:
        if not forget_filter.covers(slot.conversation):
            return _strip(folder, slot, forget_filter, slot.meta["owner"])
        end, conversation = max(
            _claims(slot, forget_filter, heirs, spoken), key=_depth, default=(0, None)
        )
        if not end:
            return None
        if end == slot.end:
            return _strip(folder, slot, forget_filter, conversation)
        return _shorten(folder, slot, forget_filter, end, conversation)
    except (Damaged, OSError, *MALFORMED) as error:
        # On a full disk: better nothing than these words.
        logger.warning("KV slot %d goes whole: %s", slot.number, error)
        return None


def _claims(
    slot: Slot,
    forget_filter: ForgetFilter,
    heirs: Sequence[Slot],
    spoken: Sequence[_Claim],
) -> Iterator[_Claim]:
    """Up to where others need a slot, and who: they go on from it, or spoke in it."""
    yield from ((heir.at, heir.meta["owner"]) for heir in heirs)
    for depth, scope in (*spoken, *_spoken(slot, forget_filter)):
        if depth > slot.at and slot.meta["state"] == STATELESS:
            yield min(depth, slot.end), scope
        elif depth == slot.end and slot.is_end:  # else nothing can end within it
            yield depth, scope


def _spoken(slot: Slot, forget_filter: ForgetFilter) -> list[_Claim]:
    """Up to where others have said what was written with a slot, before it as well."""
    return [(turn["depth"], turn["scope"]) for turn in _others(slot, forget_filter)]


def _depth(claim: _Claim) -> int:
    return claim[0]


def _shorten(
    folder: SlotFolder,
    slot: Slot,
    forget_filter: ForgetFilter,
    end: int,
    conversation: Any,
) -> Slot:
    """Keep what stands before a depth, as another's."""
    draft, changes = _cut_kv(folder, slot, end)
    kept = [_without_lineage(t) for t in _others(slot, forget_filter)]
    words = {"kept": kept, "owner": conversation, "keeps_end": True}
    ids = slot.ids[: end - slot.at]
    folder.rewrite_metadata(slot, {**changes, **words}, (ids, _NOTHING), draft)
    return folder.read(slot.number)


def _chain(slot: Slot, below: Mapping[str, Sequence[Slot]]) -> list[Slot]:
    """A slot and all that go on from it, those first that none goes on from."""
    found, todo = list[Slot](), [slot]
    while todo:
        found.append(todo.pop())
        todo.extend(below.get(found[-1].uid, ()))
    return found[::-1]


def _strip(
    folder: SlotFolder, slot: Slot, forget_filter: ForgetFilter, conversation: Any
) -> Slot:
    """Let a slot say nothing of some conversations; what it is then."""
    before, kept = slot.meta["kept"], _others(slot, forget_filter)
    if len(kept) == len(before) and conversation == slot.meta["owner"]:
        return slot
    canonical = slot.canonical
    if before[-1:] != kept[-1:]:  # what the last one's prompt looked like goes with it
        kept, canonical = list(map(_without_lineage, kept)), _NOTHING
    folder.rewrite_metadata(
        slot, {"kept": kept, "owner": conversation}, (slot.ids, canonical)
    )
    return folder.read(slot.number)


def _others(slot: Slot, forget_filter: ForgetFilter) -> list[Mapping[str, Any]]:
    """What was said in a slot, but for some conversations."""
    said: list[Mapping[str, Any]] = slot.meta["kept"]
    return [
        turn
        for turn in said
        if not forget_filter.covers(conversation_of(turn["scope"]))
    ]


def _without_lineage(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name != "lineage"}


def _cut_kv(folder: SlotFolder, slot: Slot, end: int) -> tuple[Draft, dict[str, Any]]:
    """
    Write the KV of a slot's first part; hold the folder's lock.

    Layers that cannot be cut have a state at its end alone, which goes.

    Args:
        end: depth behind its last token, inside the slot.
    Returns:
        A draft that holds it; what of the slot's meta is another then.
    Raises:
        Damaged: it is not what was written. OSError: of the disk.
    """
    keep, draft = end - slot.at, folder.draft()
    runs = set(itertools.chain.from_iterable(slot.meta["runs"]))
    scalars = {**slot.meta["scalars"], **dict.fromkeys(_offsets(slot), keep)}
    state = STATELESS if slot.meta["state"] == STATELESS else STATE_GONE
    metadata = (
        {"format": RUN_FORMAT}
        if slot.parent or state == STATE_GONE
        else metadata_of(tuple(slot.meta["classes"]), scalars)
    )
    try:
        with folder.file(slot.number, "cache").open("rb") as kv:
            header = read_header(kv)
            specs = [
                _cut_spec(spec, keep, runs)
                for name, (spec, _) in header.places.items()
                if name in runs or name in scalars
            ]
            with open_private(draft.paths["cache"]) as file:
                names = [spec.name for spec in specs]
                arrays = _arrays(kv, header, slot, names, keep, runs, scalars)
                sums = write_tensors(file, specs, metadata, arrays)
                make_durable(file)
                draft.num_bytes = file.tell()
    except BaseException:
        draft.discard()
        raise
    return draft, {
        "end": end,
        "crc32": sums,
        "scalars": scalars,
        "state": state,
        "bytes": draft.num_bytes,
    }


def _offsets(slot: Slot) -> Iterator[str]:
    """Names of the numbers of tokens of the runs (cache_form)."""
    for run in slot.meta["runs"]:
        if run:
            yield run[0].rsplit(".", 1 if len(run) == 2 else 2)[0] + ".2"


def _cut_spec(spec: TensorSpec, keep: int, runs: set[str]) -> TensorSpec:
    if spec.name not in runs:
        return spec
    return TensorSpec(spec.name, spec.dtype, (*spec.shape[:-2], keep, spec.shape[-1]))


def _arrays(
    kv: BinaryIO,
    header: Header,
    slot: Slot,
    names: Sequence[str],
    keep: int,
    runs: set[str],
    scalars: Mapping[str, Any],
) -> Iterator[np.ndarray]:
    for name in names:
        if name not in runs:
            yield to_numpy(scalar_array(scalars[name]))
            continue
        array = read_tensor(kv, header, name)
        if sum_of_bytes(array) != slot.meta["crc32"][name]:
            raise Damaged(f"{name} is not what was written")
        yield array[..., :keep, :]
