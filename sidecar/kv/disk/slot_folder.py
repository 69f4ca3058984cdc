"""
One model's slots: files that appear whole or not at all, and change to forget only.

A slot is three files; the last one to appear, of its ids, makes it one. They are
written under names of their own, made durable, and renamed under the folder's lock, so
a process that is killed at any moment leaves the slots that were there, and perhaps
files that nobody looks at. Only slots that no other one goes on from are deleted. What
is forgotten of a slot is taken out of it by files that are written anew.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sidecar.kv.disk.durable_files import MALFORMED, open_regular, sync_folder
from sidecar.kv.disk.slot import VERSION, Slot, parse_slot, write_words
from sidecar.kv.disk.slot_arrays import OpenSlot, open_kv
from sidecar.kv.disk.tensor_file import (
    Damaged,
    read_header,
    read_tensor,
)

logger = logging.getLogger(__name__)

_PARTS = {"cache": "safetensors", "meta": "json", "tokens": "safetensors"}
_NAME = re.compile(r"slot_(\d+)_(cache|meta|tokens)\.(safetensors|json)")
_MAX_SLOTS = 10**12  # numbers above are nobody's
_LOCK_WAIT_S = 10.0
_MAX_WORDS = 256 << 20


class Replaced(Exception):
    """A slot that was there is not any more; another may have its number."""


@dataclass(frozen=True, slots=True)
class Link:
    """A slot as the janitor sees it: who it is, whom it goes on from, its bytes."""

    uid: str
    parent: str
    num_bytes: int
    used: float


@dataclass(eq=False)
class Draft:
    """Files of a slot that is being written; gone unless it is committed."""

    paths: dict[str, Path]
    is_done: bool = False
    num_bytes: int = 0

    def discard(self) -> None:
        """Delete what is left of it; repeatable."""
        for path in () if self.is_done else self.paths.values():
            with contextlib.suppress(OSError):
                path.unlink()


@dataclass(eq=False)
class SlotFolder:
    """A folder of slots. Any thread, any number of processes."""

    path: Path

    def make(self) -> None:
        """
        Have it there, for its owner alone.

        Raises:
            OSError: it cannot be.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """
        Hold the folder's lock; the kernel lets it go when a process dies.

        Raises:
            OSError: it is held too long, or the file system has none.
        """
        lock = os.open(
            self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            deadline = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(lock, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{self.path.name} is locked") from None
                    time.sleep(0.005)
            yield
        finally:
            os.close(lock)

    def file(self, number: int, part: str) -> Path:
        """Where a part of a slot is."""
        return self.path / f"slot_{number}_{part}.{_PARTS[part]}"

    def files(self) -> dict[int, set[str]]:
        """Numbers of all files of slots -> the parts that are there."""
        found: dict[int, set[str]] = {}
        for number, part, is_file in self._named():
            if is_file:  # whoever reads a pipe waits for ever
                found.setdefault(number, set()).add(part)
        return found

    def _named(self) -> Iterator[tuple[int, str, bool]]:
        """What has the name of a slot's file: number, part, whether it is a file."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                number = int(match[1]) if match and len(match[1]) < 19 else 0
                if not match or not 0 < number <= _MAX_SLOTS:
                    continue
                if entry.name == self.file(number, match[2]).name:
                    yield number, match[2], entry.is_file(follow_symlinks=False)

    def numbers(self) -> list[int]:
        """Slots that are there, ascending."""
        return sorted(n for n, parts in self.files().items() if len(parts) == 3)

    def stamps(self) -> dict[int, tuple[int, int]]:
        """
        Of each slot what changes if another one takes its number.

        Raises:
            OSError: it cannot be looked at.
        """
        found = {}
        for number in self.numbers():
            with contextlib.suppress(FileNotFoundError):
                status = self.file(number, "tokens").stat()
                found[number] = (status.st_ino, status.st_mtime_ns)
        return found

    def changed_at(self) -> int:
        """Changes with what is in it; 0: it is not there."""
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return 0

    def draft(self) -> Draft:
        """Begin a slot."""
        stem = f".tmp-{os.getpid()}-{secrets.token_hex(6)}"
        return Draft({part: self.path / f"{stem}-{part}" for part in _PARTS})

    def commit(self, draft: Draft, parent: Slot | None) -> Slot | None:
        """
        Make a slot of a draft that is written whole; None: its parent is gone.

        Raises:
            OSError: of the disk; nothing is left of it.
        """
        with self.locked():
            if parent is not None and self.uid_of(parent.number) != parent.uid:
                return None
            number = 1 + max((taken for taken, *_ in self._named()), default=0)
            if number > _MAX_SLOTS:  # it would be in no list, and never forgotten
                raise OSError(f"{self.path.name} has a slot {_MAX_SLOTS}")
            for part in _PARTS:
                draft.paths[part].rename(self.file(number, part))
            draft.is_done = True
            sync_folder(self.path)
        return self.read(number)

    def describe(
        self,
        draft: Draft,
        parent: Slot | None,
        meta: Mapping[str, Any],
        arrays: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """
        Write all of a slot but its KV, which is written.

        Args:
            meta: at, end, crc32 (of the KV's tensors), salt, owner, and what else
                there is.
            arrays: its ids; the canonical ids of the last prompt in it.
        Raises:
            OSError: of the disk.
        """
        uid = secrets.token_hex(16)
        link = None if parent is None else (parent.number, parent.uid)
        whole_meta = {
            **meta,
            "version": VERSION,
            "uid": uid,
            "parent": link,
            "bytes": draft.num_bytes,
            "created": time.time(),
        }
        with draft.paths["cache"].open("rb") as kv:
            header = read_header(kv)
        write_words(draft.paths, whole_meta, arrays, (header.crc32, header.size))

    def rewrite_metadata(
        self,
        slot: Slot,
        changes: Mapping[str, Any],
        arrays: tuple[np.ndarray, np.ndarray],
        draft: Draft | None = None,
    ) -> None:
        """
        Say anew what is known of a slot; hold the folder's lock.

        A process that is killed meanwhile leaves the slot as it was, as it is to be, or
        none: its files do not agree until the last one, of its ids, is there.

        Args:
            changes: fields of its meta that change. arrays: its ids; canonical ids.
            draft: with other KV; None: that stays.
        Raises:
            OSError: of the disk.
        """
        parts = ("meta", "tokens") if draft is None else tuple(_PARTS)
        draft = draft or self.draft()
        meta = {name: v for name, v in slot.meta.items() if not name.startswith("_")}
        try:
            cache = slot.meta["_crc32"], slot.num_bytes
            if "cache" in parts:
                with draft.paths["cache"].open("rb") as kv:
                    header = read_header(kv)
                cache = header.crc32, header.size
            write_words(draft.paths, {**meta, **changes}, arrays, cache)
            os.utime(draft.paths["meta"], (slot.used, slot.used))
            for part in parts:
                draft.paths[part].rename(self.file(slot.number, part))
            sync_folder(self.path)
        finally:
            draft.discard()

    def _opened(self, number: int, part: str) -> BinaryIO:
        """A slot's file, to be read. One that is a pipe would never end."""
        path = self.file(number, part)
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Damaged(f"its {part} are in no file")
        return os.fdopen(open_regular(path, os.O_RDONLY), "rb")

    def read(self, number: int) -> Slot:
        """
        What a slot is, without its KV.

        Raises:
            Damaged: it is not one. OSError: it is gone, or the disk fails.
        """
        meta_file = self.file(number, "meta")
        with self._opened(number, "tokens") as file:
            header = read_header(file)
            if max(header.size, meta_file.stat().st_size) > _MAX_WORDS:
                raise Damaged("its ids or its meta are too large")
            ids = read_tensor(file, header, "tokens")
            canonical = read_tensor(file, header, "canonical")
        with self._opened(number, "meta") as file:
            text, used = file.read(), os.fstat(file.fileno()).st_mtime
        try:
            return parse_slot(number, header, text, (ids, canonical), used)
        except MALFORMED as error:
            raise Damaged(f"its meta is not one: {error!r}") from error

    def open(self, slot: Slot) -> OpenSlot:
        """
        Open a slot's KV; hold the folder's lock.

        Raises:
            Replaced: another slot has its number now. Damaged: it is not what was
            written. OSError: it is gone, or the disk fails.
        """
        again = self.read(slot.number)
        if (again.uid, again.end) != (slot.uid, slot.end):
            raise Replaced("another slot has its number now")
        path = self.file(slot.number, "cache")
        with self._opened(slot.number, "cache") as file:
            header = read_header(file)
        if (header.crc32, header.size) != (again.meta["_crc32"], again.num_bytes):
            raise Damaged("its KV is not what was written")
        return open_kv(path, again)

    def touch(self, slot: Slot) -> None:
        """Note that it was of use now."""
        with contextlib.suppress(OSError):
            os.utime(self.file(slot.number, "meta"))

    def delete(self, number: int) -> int:
        """Delete a slot; the bytes of its KV. Hold the folder's lock."""
        freed = 0
        for part in ("tokens", "meta", "cache"):
            with contextlib.suppress(FileNotFoundError):
                path = self.file(number, part)
                freed += path.stat().st_size
                path.unlink()
        return freed

    def quarantine(self, number: int, uid: str | None, why: str) -> bool:
        """
        Make a damaged slot none; its files go later.

        Args:
            uid: of the one that is meant; None: what has the number cannot be read.
        Returns:
            Whether it was; another may have its number by now, and stays.
        """
        path = self.file(number, "tokens")
        with contextlib.suppress(OSError), self.locked():
            if uid is None:
                with contextlib.suppress(Damaged):
                    self.read(number)
                    return False
            elif self.uid_of(number) != uid:
                return False
            path.rename(path.with_name(f"slot_{number}_{secrets.token_hex(4)}.bad"))
            logger.warning(
                "KV slot %d of %s is put aside: %s", number, self.path.name, why
            )
            return True
        return False

    def links(self) -> dict[int, Link]:
        """All slots, by their headers alone; what is none is not among them."""
        found = {}
        for number in self.numbers():
            with contextlib.suppress(OSError, Damaged, KeyError):
                found[number] = self._link(number)
        return found

    def _link(self, number: int) -> Link:
        with self._opened(number, "tokens") as file:
            metadata = read_header(file).metadata
        sizes = [self.file(number, part).stat() for part in _PARTS]
        if not (
            isinstance(metadata["uid"], str) and isinstance(metadata["parent"], str)
        ):
            raise Damaged("it does not say who it is")
        return Link(
            metadata["uid"],
            metadata["parent"],
            sum(size.st_size for size in sizes),
            sizes[list(_PARTS).index("meta")].st_mtime,
        )

    def uid_of(self, number: int) -> str | None:
        """Of the slot that has a number; None: there is none."""
        try:
            return self._link(number).uid
        except (OSError, Damaged, KeyError):
            return None
