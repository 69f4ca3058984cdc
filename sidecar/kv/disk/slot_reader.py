"""
Brings a path back from the disk: read, checked, joined, and handed to the store.

All of it happens on the disk's thread; the GPU thread only takes the finished arrays,
in one short turn. What is damaged is put aside, and is a miss from then on.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from sidecar.core.prompt import ModelIds
from sidecar.infra.metrics import Counters
from sidecar.kv.disk.cache_form import as_type, restore_states
from sidecar.kv.disk.ports import Turn
from sidecar.kv.disk.slot import Slot
from sidecar.kv.disk.slot_folder import OpenSlot, SlotFolder
from sidecar.kv.disk.slot_index import DiskMatch, SlotIndex
from sidecar.kv.disk.tensor_file import Damaged
from sidecar.kv.kv_layers import KVLayers
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import Buffer, Owner

_SMOOTHING = 0.3
_FIRST_RATE = 1e9  # bytes a second
_Read = list[list[tuple[mx.array, str]]]  # of each layer, its arrays and dtypes


class Unwanted(Exception):
    """Nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    A path that is to be brought back.

    Args:
        epoch: of the store, in which it was asked for.
        make_room: for so many bytes, on the GPU thread; whether there is.
        is_wanted: whether somebody still waits.
    """

    ids: ModelIds
    owner: Owner
    epoch: int
    make_room: Callable[[int], bool]
    is_wanted: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Part:
    """Of an open slot, the tokens [start, end) of the path."""

    opened: OpenSlot
    start: int
    end: int


class SlotReader:
    """Of one model. The disk's thread only, but for `rate`."""

    def __init__(
        self, store: PrefixStore, folder: SlotFolder, index: SlotIndex, turn: Turn
    ) -> None:
        self._store = store
        self._folder = folder
        self._index = index
        self._turn = turn
        self.rate = _FIRST_RATE  # bytes a second
        self.counters = Counters((
            "disk_bytes_read", "disk_tokens_restored", "disk_restored", "disk_damaged",
        ))  # fmt: skip

    def restore(self, match: DiskMatch, wanted: Wanted) -> bool:
        """
        Have the store hold a path, as deep as a match is; whether it does.

        Raises:
            Unwanted: the request is gone.
        """
        ids, owner = ModelIds(wanted.ids[: match.depth]), wanted.owner
        start = min(self._store.stored_len(ids, owner.salt), match.depth)
        started = time.perf_counter()
        with contextlib.ExitStack() as files:
            try:
                parts = self._open(match, start, files)
                num_bytes = sum(part.opened.slot.num_bytes for part in parts)
                if not self._turn(lambda: wanted.make_room(num_bytes)):
                    return False
                read = [
                    (group, self._read(group, wanted.is_wanted))
                    for group in _alike(parts)
                ]
                last = parts[-1].opened.slot
                state = (last, self._state(parts[-1].opened))
            except _Faulty as fault:
                self._give_up(fault)
                return False
        seconds = time.perf_counter() - started
        self.rate += _SMOOTHING * (num_bytes / max(seconds, 1e-6) - self.rate)
        try:
            if not self._turn(lambda: self._hand_over(wanted, ids, read, state)):
                return False
        except Damaged as error:
            self._give_up(_Faulty(last, error))
            return False
        for used in match.chain:
            self._folder.touch(used)
        self.counters.add_all({
            "disk_bytes_read": num_bytes, "disk_restored": 1,
            "disk_tokens_restored": match.depth - start,
        })  # fmt: skip
        return True

    def _hand_over(
        self,
        wanted: Wanted,
        ids: ModelIds,
        read: Sequence[tuple[list[_Part], _Read]],
        state: tuple[Slot, dict[str, tuple[mx.array, str]]],
    ) -> bool:
        """On the GPU thread: what was read becomes the store's."""
        runs = [
            Buffer(
                [[as_type(*array) for array in layer] for layer in layers],
                group[0].start, group[-1].end - group[0].start,
            )
            for group, layers in read
        ]  # fmt: skip
        checkpoint = self._checkpoint(*state, len(ids))
        mx.eval([array for run in runs for layer in run.arrays for array in layer])
        return self._store.adopt(ids, wanted.owner, runs, checkpoint, wanted.epoch)

    def _open(
        self, match: DiskMatch, start: int, files: contextlib.ExitStack
    ) -> list[_Part]:
        """Open all that is needed at once: none can be deleted in between."""
        ends = [slot.at for slot in match.chain[1:]] + [match.depth]
        parts = []
        with _faults_of(match.chain[0]), self._folder.locked(shared=True):
            for slot, end in zip(match.chain, ends, strict=True):
                if end <= start and slot is not match.chain[-1]:
                    continue
                with _faults_of(slot):
                    opened = self._folder.open(slot)
                files.callback(opened.file.close)
                parts.append(_Part(opened, max(start, slot.at), max(start, end)))
        return parts

    def _read(self, group: Sequence[_Part], is_wanted: Callable[[], bool]) -> _Read:
        layers: _Read = []
        for named in group[0].opened.slot.meta["runs"]:
            if not is_wanted():
                raise Unwanted
            layers.append([_joined(group, name) for name in named])
        return layers

    def _state(self, opened: OpenSlot) -> dict[str, tuple[mx.array, str]]:
        """All arrays of the layers that cannot be cut."""
        if not self._store.needs_checkpoints:
            return {}
        slot = opened.slot
        with _faults_of(slot):
            runs = {name for layer in slot.meta["runs"] for name in layer}
            skipped = runs | {*slot.meta["scalars"]}
            names = [name for name in opened.header.places if name not in skipped]
            return {name: _array(*opened.read(name)) for name in names}

    def _checkpoint(
        self, slot: Slot, state: dict[str, tuple[mx.array, str]], depth: int
    ) -> list[Any]:
        if not self._store.needs_checkpoints:
            return []
        arrays = {name: as_type(*value) for name, value in state.items()}
        fresh: KVLayers = self._store.empty_cache()
        found = restore_states(fresh, slot.meta["scalars"], arrays)
        mx.eval(list(arrays.values()))
        counted = [a for a in found if getattr(a, "keys", None) is not None]
        if any(int(a.offset) != depth for a in counted if hasattr(a, "offset")):
            raise Damaged("its state is of another depth")
        return found

    def _give_up(self, fault: "_Faulty") -> None:
        """A damaged slot is none any more; one that is gone is forgotten."""
        slot, cause = fault.slot, fault.cause
        self._index.remove(slot.number)
        if isinstance(cause, FileNotFoundError):
            return
        self.counters.add("disk_damaged")
        self._folder.put_aside(slot.number, str(cause))


class _Faulty(Exception):
    def __init__(self, slot: Slot, cause: Exception) -> None:
        super().__init__(str(cause))
        self.slot = slot
        self.cause = cause


@contextlib.contextmanager
def _faults_of(slot: Slot) -> Any:
    try:
        yield
    except (Damaged, OSError, KeyError, ValueError, TypeError, MemoryError) as error:
        raise _Faulty(slot, error) from error


def _alike(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Parts in a row whose layers are packed alike, which can be joined."""
    groups: list[list[_Part]] = []
    for part in parts:
        packed = part.opened.slot.meta["packed"]
        if groups and groups[-1][0].opened.slot.meta["packed"] == packed:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _array(values: np.ndarray, dtype: str) -> tuple[mx.array, str]:
    return mx.array(values), dtype  # a copy, made here and not on the GPU thread


def _joined(group: Sequence[_Part], name: str) -> tuple[mx.array, str]:
    """One array of a layer over several slots, tokens on the axis before the last."""
    read, dtypes = [], set()
    for part in group:
        slot = part.opened.slot
        with _faults_of(slot):
            values, dtype = part.opened.read(name)
            if values.ndim < 2 or values.shape[-2] != slot.length:
                raise Damaged(f"{name} has the shape {values.shape}")
            dtypes.add(dtype)
            if len(dtypes) > 1:
                raise Damaged(f"{name} is of another type than before")
            read.append(values[..., part.start - slot.at : part.end - slot.at, :])
    with _faults_of(group[-1].opened.slot):
        whole = read[0] if len(read) == 1 else np.concatenate(read, axis=-2)
        return _array(np.ascontiguousarray(whole), dtypes.pop())
