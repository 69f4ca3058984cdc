"""
One loaded model's KV on the disk: looked up, restored, written, forgotten.

Trouble with the disk is a warning and a prompt that is computed anew; no request fails
by it. Formats: slot_folder, cache_form. When what is written: write_queue. The theory
stands in docs/disk.md.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace
from pathlib import Path

from sidecar.core.conversation import Conversation, ForgetFilter
from sidecar.core.prompt import Hit, ModelIds
from sidecar.kv.disk.disk_thread import Urgency
from sidecar.kv.disk.forgetting import (
    forget,
    forget_all,
    forget_some,
)
from sidecar.kv.disk.ports import DiskSettings, Machine, MemoryPort, salt_name
from sidecar.kv.disk.root import DiskRoot
from sidecar.kv.disk.slot import Slot
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.kv.disk.slot_index import DiskMatch, SlotIndex
from sidecar.kv.disk.slot_reader import RestoreCancelled, RestoreRequest, SlotReader
from sidecar.kv.disk.slot_writer import SlotWriter, without_arrays
from sidecar.kv.disk.tensor_file import Damaged
from sidecar.kv.disk.tombstone_log import TombstoneLog
from sidecar.kv.disk.write_queue import PendingWrite, WriteQueue
from sidecar.kv.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

_PAYS = 0.8  # of the time to compute, at most, for a restore that is weighed
_RESTORE_S = 120.0  # then the prompt is computed
_TICK_S = 0.1
_TRIES = 4
_FORGET_S = 60.0
_LOOK_EVERY_S = 1.0  # for slots of other processes


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder that is known, and who reads and writes there."""

    folder: SlotFolder
    reader: SlotReader
    writer: SlotWriter
    tombstones: TombstoneLog


class DiskCache:
    """
    Of one loaded model, until it is closed. Any thread.

    Args:
        find_folder: where its slots are; may take long, raises OSError.
        model: what it is called.
    """

    def __init__(
        self,
        store: PrefixStore,
        root: DiskRoot,
        find_folder: Callable[[], SlotFolder],
        explained: MemoryPort,
        machine: Machine,
        settings: DiskSettings,
        model: str = "",
    ) -> None:
        self._store = store
        self._root = root
        self._find_folder = find_folder
        self._explained = explained
        self._machine = machine
        self._settings = settings
        self._index = SlotIndex()
        self._write_queue = WriteQueue(
            store, self._index, machine, settings, self._write, self._share_marks
        )
        self._lock = threading.RLock()  # of what forgetting must not come between
        self._num_cleared = 0
        self._looked_at = 0.0
        self._seen = 0
        self._stamps: dict[int, tuple[int, int]] = {}  # of the slots that were taken in
        self._forgotten: list[ForgetFilter | None] = []  # before its folder was known
        self._place: _Place | None = None
        self._closed = threading.Event()
        self._logging: Future[None] = Future()  # of tombstones: one at a time
        self._logging.set_result(None)
        self.model = model
        store.on_kept = self._write_queue.due.note

    def counters(self) -> dict[str, int]:
        """What was written, read, and left."""
        place = self._place
        if place is None:
            return {}
        return {**place.writer.counters.snapshot(), **place.reader.counters.snapshot()}

    @property
    def is_closed(self) -> bool:
        """Whether it writes and reads nothing any more."""
        return self._closed.is_set()

    @property
    def is_open(self) -> bool:
        """Whether its folder is known, and what is in it."""
        return self._place is not None

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until it is open, at most so many seconds; whether it is."""
        until = time.monotonic() + timeout_s
        while not self.is_open and time.monotonic() < until:
            self._closed.wait(_TICK_S)
        return self.is_open

    @property
    def folders(self) -> set[Path]:
        """Where its slots are, as far as that is known."""
        return {self._place.folder.path} if self._place else set()

    @property
    def num_slots(self) -> int:
        """Slots that are known."""
        return len(self._index)

    def num_written(self, ids: ModelIds) -> int:
        """Tokens of a prompt of nobody's that are there."""
        return self._index.match(ids, "").depth

    def open(self, *, at_once: bool) -> None:
        """
        Learn what is there; what rests is written from then on.

        Args:
            at_once: before this returns; else on a thread of its own.
        """
        if at_once:
            self._open()
        else:
            # On a thread of its own: a restore of another model must not wait for it.
            threading.Thread(target=self._open, name="kv-digest", daemon=True).start()

    def _open(self) -> None:
        try:
            folder = self._find_folder()
        except Exception as error:  # noqa: BLE001 - the model serves without it
            logger.warning("KV is not kept on the disk: %s", error)
            self._store.on_kept = _not_noted
            return
        turn = self._machine.turn
        with self._lock:
            self._forget_before(folder)
            self._place = _Place(
                folder,
                SlotReader(self._store, folder, self._index, turn),
                SlotWriter(
                    self._store,
                    self._root,
                    folder,
                    self._index,
                    self._explained,
                    turn,
                    self._settings,
                ),
                TombstoneLog(SlotFolder(self._root.path), self._explained.tombstones),
            )
            self._refresh(folder)
        self._write_queue.start()

    def lookup(self, ids: ModelIds, salt: str, held: Hit) -> Hit:
        """
        What is held of a prompt, the disk's share included.

        Args:
            held: what of it is in memory.
        """
        place = self._place
        if place is None:
            return held
        found = self._found(place, ids, salt, held.memory_len)
        num_bytes = found.bytes_behind(held.memory_len)
        restore_s = num_bytes / place.reader.rate
        return replace(held, disk_len=found.depth, restore_s=restore_s)

    def restore(
        self,
        ids: ModelIds,
        conversation: Conversation,
        hit: Hit,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """
        Bring into memory what the look-up of a prompt found; False: it did not come.

        Args:
            is_wanted: whether its client is still there.
        """
        place = self._place
        if place is None:
            return False
        until = time.monotonic() + self._patience_s(hit.disk_len - hit.memory_len)
        given_up = threading.Event()
        wanted = RestoreRequest(
            ids, conversation, self._machine.make_room, lambda: not given_up.is_set()
        )
        restored = self._machine.thread.submit(
            Urgency.RESTORE, lambda: self._restore(place, wanted)
        )
        try:
            while is_wanted() and time.monotonic() < until:
                with contextlib.suppress(TimeoutError):
                    return restored.result(_TICK_S)
        except RestoreCancelled:
            return False
        except Exception:
            logger.exception("KV could not be restored from the disk")
            return False
        finally:
            given_up.set()
        if is_wanted():  # it was late: a disk that hangs is not asked for ever
            place.reader.was_slow()
        return False

    def _patience_s(self, num_tokens: int) -> float:
        """How long a restore may take: where it is weighed, as long as computing."""
        if self._settings.restore == "always":
            return _RESTORE_S
        return min(_RESTORE_S, max(_TICK_S, num_tokens * self._machine.token_s()))

    def _restore(self, place: _Place, wanted: RestoreRequest) -> bool:
        """
        Look again: another request may have brought it, or found it damaged.

        Of a damaged chain the sound part is brought; what was forecast was more.
        """
        salt, is_whole = wanted.conversation.salt, True
        for _ in range(_TRIES):
            held = self._store.match_len(wanted.ids, salt)
            found = self._found(place, wanted.ids, salt, held)
            if found.depth == 0 or place.reader.restore(found, wanted):
                return is_whole
            is_whole = False
        return False

    def _found(self, place: _Place, ids: ModelIds, salt: str, held: int) -> DiskMatch:
        """What of a prompt is to be restored; nothing, if that does not pay."""
        settings, maximum = self._settings, len(ids) - 1
        minimum = held + settings.min_gain
        may = settings.restore != "never" and self._store.may_restore
        if not may or self._is_off or maximum < minimum:
            return DiskMatch()
        self._refresh_if_due(place.folder)
        if self._store.needs_checkpoints:
            match = self._index.match_at_end(ids, salt_name(salt), maximum)
        else:
            match = self._index.match(ids, salt_name(salt)).at_most(maximum)
        minimum = max(minimum, settings.min_tokens, self._store.min_depth(ids))
        if match.depth < minimum:
            return DiskMatch()
        computing_s = (match.depth - held) * self._machine.token_s()
        reading_s = match.bytes_behind(held) / place.reader.rate
        if settings.restore == "auto" and reading_s > _PAYS * computing_s:
            return DiskMatch()
        return match

    @property
    def _is_off(self) -> bool:
        """Whether the model's self-test of it has failed, or is still to come."""
        return "disk" in self._store.switched_off

    def flush(self) -> None:
        """Write all that is due, now; returns when it is written."""
        if self._place is not None:
            self._write_queue.flush()

    def close(self) -> None:
        """Write what is due, and be asked nothing any more; repeatable."""
        if not self._closed.is_set():
            self.flush()
            self._closed.set()
            self._write_queue.close()
            self._store.on_kept = _not_noted

    def forget(self, forget_filter: ForgetFilter | None = None) -> tuple[int, int]:
        """
        Delete all of it, or some conversations; slots, and their bytes.

        What is being written or restored of these comes to nothing.

        Raises:
            OSError: they cannot be deleted.
        """
        self._write_queue.due.forget(forget_filter)
        with self._lock:
            place = self._place
            if place is None:
                self._forgotten.append(forget_filter)
                return 0, 0
            if forget_filter is None:
                self._num_cleared += 1
                self._index.clear()
                self._stamps, self._seen = {}, 0
                return forget_all(place.folder)

        def act() -> tuple[int, int]:
            try:
                return forget_some(place.folder, forget_filter)
            finally:
                self._seen = 0  # a clock that ticks slowly shows no change
                self._refresh(place.folder)

        # On the disk's thread nothing of it is read or written meanwhile.
        return self._machine.thread.submit(Urgency.RESTORE, act).result(_FORGET_S)

    def clear_tombstones(self) -> None:
        """Forget which turns are hidden: none of any model is left."""
        self._explained.tombstones.clear()

    def _forget_before(self, folder: SlotFolder) -> None:
        """What was forgotten while nobody knew where it is."""
        for forget_filter in self._forgotten:
            try:
                forget(folder, forget_filter)
            except OSError as error:
                logger.warning("KV on the disk could not be deleted: %s", error)

    def _write(self, due: PendingWrite, *, is_last: bool) -> None:
        place = self._place
        if place is None or self._closed.is_set() or self._is_off:
            return
        try:
            self._refresh(place.folder)
            may = self._current(due)
            place.writer.write(due.ids, due.conversation, may, is_last=is_last)
            self._root.clear_away()
        except FileNotFoundError as error:  # another process has forgotten all
            logger.info("KV was not written: %s", error)
        except OSError as error:
            self._root.pause(error)
        except Exception:
            logger.exception("KV could not be written to the disk")

    def _share_marks(self) -> None:
        """Read tombstones of other processes; have those written that no file has."""
        place = self._place
        if place is None:
            return
        try:
            with self._lock:
                place.tombstones.read()
        except OSError as error:
            self._root.pause(error)
        if self._logging.done() and self._explained.tombstones.unlogged():
            log = functools.partial(self._log_marks, place.tombstones)
            self._logging = self._machine.thread.submit(Urgency.WRITE, log)

    def _log_marks(self, log: TombstoneLog) -> None:
        try:
            with self._lock:
                log.write()
        except OSError as error:
            self._root.pause(error)

    def _current(
        self, due: PendingWrite
    ) -> Callable[[], contextlib.AbstractContextManager[bool]]:
        """Holds forgetting off, and says whether there was none of it since."""
        begun = self._num_cleared

        @contextlib.contextmanager
        def current() -> Iterator[bool]:
            with self._lock:
                is_current = self._store.is_current(due.conversation)
                yield is_current and begun == self._num_cleared

        return current

    def _refresh_if_due(self, folder: SlotFolder) -> None:
        """At most once a second: another process may have written. No waiting."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S and self._lock.acquire(
            blocking=False
        ):
            try:
                self._looked_at = now
                self._refresh(folder)
            finally:
                self._lock.release()

    def _refresh(self, folder: SlotFolder) -> None:
        """Take in the slots that came, and drop those that went."""
        changed = folder.changed_at()
        with self._lock:
            try:
                if self._place is not None:  # what it hides must not be known again
                    self._place.tombstones.read()
            except OSError as error:
                self._root.pause(error)
                return
            if changed == self._seen:
                return
            self._seen = changed
            try:
                there = folder.stamps()
            except OSError as error:
                logger.warning("KV on the disk cannot be looked at: %s", error)
                return
            for number in [slot.number for slot in self._index.slots()]:
                stamp = there.get(number)  # of one that was written here none is known
                if stamp is None or stamp != self._stamps.get(number):
                    self._index.remove(number)
            self._stamps = there
            for number in sorted(there):
                if self._index.get(number) is None:
                    self._take_in(folder, number)

    def _take_in(self, folder: SlotFolder, number: int) -> None:
        try:
            slot = folder.read(number)
        except OSError as error:  # gone, or not to be read now
            logger.info("KV slot %d cannot be read: %s", number, error)
            return
        except Damaged as error:
            if folder.quarantine(number, None, str(error)) and self._place is not None:
                self._place.reader.counters.add("disk_damaged")
            return
        if self._index.add(without_arrays(slot)):
            self._load(slot)

    def _load(self, slot: Slot) -> None:
        try:
            self._explained.load(slot.meta["kept"], slot.canonical)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            logger.warning("of slot %d nothing is known: %r", slot.number, error)


def _not_noted(ids: ModelIds, conversation: Conversation) -> None:
    pass
