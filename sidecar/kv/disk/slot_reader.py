"""
Restores a prompt's path of slots: reads each, joins them, gives them to the store.

Reading and checking happen on the disk's thread; the GPU thread joins the runs of a
layer, a short turn each, and takes the whole in one more. What is damaged is put aside,
and is a miss from then on.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from sidecar.core.conversation import Conversation
from sidecar.core.prompt import ModelIds
from sidecar.infra.metrics import Counters
from sidecar.kv.disk.cache_form import restore_states
from sidecar.kv.disk.ports import READING, Turn
from sidecar.kv.disk.slot import Slot
from sidecar.kv.disk.slot_arrays import OpenSlot
from sidecar.kv.disk.slot_folder import Replaced, SlotFolder
from sidecar.kv.disk.slot_index import DiskMatch, SlotIndex
from sidecar.kv.disk.tensor_file import Damaged
from sidecar.kv.kv_layers import KVLayers, Leaves
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import Buffer

logger = logging.getLogger(__name__)

_SMOOTHING = 0.3
_FIRST_RATE = 1e9  # bytes a second
_State = tuple[Slot, dict[str, mx.array]]  # the slot it stands in; arrays by name
_Runs = list[tuple[int, int, list[Leaves]]]  # from a depth to another: all layers


class RestoreCancelled(Exception):
    """Nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """
    A path that is to be restored.

    Args:
        owner: for whom.
        make_room: for so many bytes, on the GPU thread; whether there is.
        is_wanted: whether somebody still waits.
    """

    ids: ModelIds
    conversation: Conversation
    make_room: Callable[[int], bool]
    is_wanted: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Part:
    """Of an open slot, the tokens [start, end) of the path."""

    opened: OpenSlot
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all that the slot has."""
        slot = self.opened.slot
        return (self.start, self.end) == (slot.at, slot.end)


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
        self.counters = Counters(READING)

    def was_slow(self) -> None:
        """Somebody gave up waiting: what is expected of the disk is halved."""
        self.rate /= 2

    def restore(self, match: DiskMatch, wanted: RestoreRequest) -> bool:
        """
        Have the store hold a path, as deep as a match is; whether it does.

        Raises:
            RestoreCancelled: the request is gone.
        """
        ids, conversation = ModelIds(wanted.ids[: match.depth]), wanted.conversation
        start = min(self._store.survey(ids, conversation.salt).depth, match.depth)
        started = time.perf_counter()
        try:
            parts = self._open(match, start)
            num_bytes = sum(part.opened.slot.num_bytes for part in parts)
            if not self._turn(lambda: wanted.make_room(num_bytes)):
                return False
            runs, state = self._load(parts, wanted.is_wanted)
        except _Faulty as fault:
            self._give_up(fault)
            return False
        seconds = time.perf_counter() - started
        self.rate += _SMOOTHING * (num_bytes / max(seconds, 1e-6) - self.rate)
        try:
            if not self._turn(lambda: self._hand_over(wanted, ids, runs, state)):
                return False
        except Damaged as error:
            self._give_up(_Faulty(match.chain[-1], error))
            return False
        for used in match.chain:
            self._folder.touch(used)
        self.counters.add_all(
            {
                "disk_bytes_read": num_bytes,
                "disk_restored": 1,
                "disk_tokens_restored": match.depth - start,
            }
        )
        return True

    def _hand_over(
        self,
        wanted: RestoreRequest,
        ids: ModelIds,
        runs: _Runs,
        state: _State,
    ) -> bool:
        """On the GPU thread: what was read becomes the store's."""
        buffers = [Buffer(layers, start, end - start) for start, end, layers in runs]
        checkpoint = self._checkpoint(*state, len(ids))
        return self._store.insert(ids, wanted.conversation, buffers, checkpoint)

    def _open(self, match: DiskMatch, start: int) -> list[_Part]:
        """Open all that is needed at once: none can be deleted in between."""
        ends = [slot.at for slot in match.chain[1:]] + [match.depth]
        parts = []
        with _faults_of(match.chain[0]), self._folder.locked(shared=True):
            for slot, end in zip(match.chain, ends, strict=True):
                if end <= start and slot is not match.chain[-1]:
                    continue
                with _faults_of(slot):
                    opened = self._folder.open(slot)
                parts.append(_Part(opened, max(start, slot.at), max(start, end)))
        return parts

    def _load(
        self, parts: Sequence[_Part], is_wanted: Callable[[], bool]
    ) -> tuple[_Runs, _State]:
        """Read all of it; what is returned was what was written."""
        runs = [
            (group[0].start, group[-1].end, self._read(group, is_wanted))
            for group in _alike(parts)
        ]
        state = self._state(parts[-1].opened)
        for part in parts:
            with _faults_of(part.opened.slot):
                part.opened.check()
        return runs, state

    def _read(
        self, group: Sequence[_Part], is_wanted: Callable[[], bool]
    ) -> list[Leaves]:
        layers = []
        for named in group[0].opened.slot.meta["runs"]:
            if not is_wanted():
                raise RestoreCancelled
            parts = [[_tokens(part, name) for part in group] for name in named]
            layers.append(self._joined(group, parts))
        return layers

    def _joined(
        self, group: Sequence[_Part], parts: Sequence[Sequence[mx.array]]
    ) -> Leaves:
        """A layer's arrays over several slots, tokens on the axis before the last."""
        if len(group) == 1 and group[0].is_whole:
            return [array for (array,) in parts]

        if any(len({array.dtype for array in same}) > 1 for same in parts):
            raise _Faulty(group[-1].opened.slot, Damaged("it is of another type"))

        def join() -> Leaves:
            joined = [
                mx.concatenate(
                    [_cut(a, p) for a, p in zip(same, group, strict=True)], -2
                )
                for same in parts
            ]
            mx.eval(joined)
            return joined

        leaves: Leaves = self._turn(join)
        return leaves

    def _state(self, opened: OpenSlot) -> _State:
        """All arrays of the layers that cannot be cut."""
        slot = opened.slot
        if not self._store.needs_checkpoints:
            return slot, {}
        with _faults_of(slot):
            runs = {name for layer in slot.meta["runs"] for name in layer}
            skipped = runs | {*slot.meta["scalars"]}
            names = [name for name in opened.arrays if name not in skipped]
            return slot, {name: opened.read(name) for name in names}

    def _checkpoint(
        self, slot: Slot, arrays: dict[str, mx.array], depth: int
    ) -> list[Any]:
        if not self._store.needs_checkpoints:
            return []
        fresh: KVLayers = self._store.empty_cache()
        found = restore_states(fresh, slot.meta["scalars"], arrays)
        counted = [a for a in found if getattr(a, "keys", None) is not None]
        if any(int(a.offset) != depth for a in counted if hasattr(a, "offset")):
            raise Damaged("its state is of another depth")
        return found

    def _give_up(self, fault: "_Faulty") -> None:
        """A damaged slot is none any more; one that is gone is forgotten."""
        slot, cause = fault.slot, fault.cause
        self._index.remove(slot.number)
        if isinstance(cause, Damaged) and self._folder.quarantine(
            slot.number, slot.uid, str(cause)
        ):
            self.counters.add("disk_damaged")
        else:
            logger.info("KV could not be brought back: %s", cause)


class _Faulty(Exception):
    def __init__(self, slot: Slot, cause: Exception) -> None:
        super().__init__(str(cause))
        self.slot = slot
        self.cause = cause


@contextlib.contextmanager
def _faults_of(slot: Slot) -> Any:
    try:
        yield
    except (KeyError, ValueError, TypeError) as error:
        raise _Faulty(slot, Damaged(f"it is no slot: {error!r}")) from error
    except (Damaged, Replaced, OSError, RuntimeError) as error:  # mlx: of the disk
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


def _tokens(part: _Part, name: str) -> mx.array:
    """One array of a slot's layer, read whole."""
    slot = part.opened.slot
    with _faults_of(slot):
        array = part.opened.read(name)
        if array.ndim < 2 or array.shape[-2] != slot.length:
            raise Damaged(f"{name} has the shape {array.shape}")
    return array


def _cut(array: mx.array, part: _Part) -> mx.array:
    at = part.opened.slot.at
    return array[..., part.start - at : part.end - at, :]
