"""
The folder of all models' slots: its limits, its wear, what is cleared away.

The limits are of the disk, not of a process: several sidecars may share a root, so what
is counted is counted in a file, under a lock. Clearing away goes by the files alone,
of all models, loaded or not.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.core.conversation import ForgetFilter
from sidecar.kv.disk.durable_files import (
    MALFORMED,
    clear_broken_off,
    open_private,
    read_private,
    replace_private,
)
from sidecar.kv.disk.forgetting import forget
from sidecar.kv.disk.slot_folder import Link, SlotFolder
from sidecar.kv.disk.tombstone_log import LOG_NAME

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"[0-9a-f]{16}")
_DAY_S, _HOUR_S = 86400.0, 3600.0
_PAUSE_S = 600.0  # after the disk said no
_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# KV of conversations, written by litellm-mlx: not to be copied into backups.\n"
)


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """
    How much of the disk may be used.

    Args:
        max_bytes: of all slots. min_free_bytes: what the disk must keep free.
        day_bytes: written in a day, 0 for no limit. ttl_s: since a slot's last use, 0
            for ever.
    """

    max_bytes: int
    min_free_bytes: int
    day_bytes: int
    ttl_s: float


class DiskRoot:
    """
    The root of all slots on this machine. Any thread.

    Args:
        clock: wall-clock seconds. For tests.
    """

    def __init__(
        self, path: Path, limits: DiskLimits, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.limits = limits
        self._clock = clock
        self._paused_until = 0.0
        self._warned: set[str] = set()

    def prepare(self) -> None:
        """
        Have the folder there, for its owner alone, and out of backups and searches.

        Raises:
            OSError: it cannot be.
        """
        if not self.path.is_dir():  # one that is there is its owner's to open or close
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in (("CACHEDIR.TAG", _TAG), (".metadata_never_index", "")):
            with (
                contextlib.suppress(FileExistsError),
                open_private(self.path / name) as file,
            ):
                file.write(text.encode())
        if sys.platform == "darwin":
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    ["tmutil", "addexclusion", str(self.path)],
                    capture_output=True,
                    timeout=10,
                    check=False,
                )

    def folder(self, key: str, description: Mapping[str, Any]) -> SlotFolder:
        """
        A model's folder.

        Args:
            key: of all that its KV depends on. description: the same, for people.
        Raises:
            OSError: it cannot be made.
        """
        folder = SlotFolder(self.path / key[:16])
        folder.make()
        with (
            contextlib.suppress(FileExistsError),
            open_private(folder.path / "model.json") as file,
        ):
            file.write(json.dumps({"key": key, **description}, indent=1).encode())
        return folder

    def folders(self) -> list[SlotFolder]:
        """Of all models: those that were made here, whatever else is beside them."""
        try:
            return [
                SlotFolder(path)
                for path in sorted(self.path.iterdir())
                if _FOLDER.fullmatch(path.name)
                and not path.is_symlink()
                and (path / "model.json").is_file()
            ]
        except OSError:
            return []

    @property
    def is_paused(self) -> bool:
        """Whether the disk said no a short while ago."""
        return time.monotonic() < self._paused_until

    def pause(self, error: OSError) -> None:
        """Write nothing for ten minutes; one warning."""
        if not self.is_paused:
            logger.warning("KV cannot be written to the disk for now: %s", error)
        self._paused_until = time.monotonic() + _PAUSE_S

    def refusal(self, num_bytes: int, *, is_last: bool) -> str | None:
        """
        Why so many bytes may not be written now: space, budget; None: they may.

        Args:
            is_last: at the end of a run a tenth more than the day's bytes may be.
        """
        limits = self.limits
        if num_bytes > limits.max_bytes:
            return "space"
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.path).free - num_bytes < limits.min_free_bytes:
                return self._tell("space", "the disk is nearly full")
        maximum = limits.day_bytes * (1.1 if is_last else 1.0)
        if limits.day_bytes and self.written_today + num_bytes > maximum:
            return self._tell("budget", "KV_DISK_MAX_WRITE_GB_PER_DAY is used up")
        return None

    def _tell(self, reason: str, text: str) -> str:
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("KV is not written to the disk: %s", text)
        return reason

    @property
    def written_today(self) -> int:
        """Bytes that all processes wrote to this root today."""
        with contextlib.suppress(OSError, *MALFORMED):
            record = json.loads(read_private(self.path / "written.json"))
            if record.get("day") == self._today:
                return int(record["bytes"])
        return 0

    def wrote(self, num_bytes: int) -> None:
        """Count what was written."""
        with contextlib.suppress(OSError), SlotFolder(self.path).locked():
            record = {"day": self._today, "bytes": self.written_today + num_bytes}
            replace_private(self.path / "written.json", json.dumps(record).encode())

    @property
    def _today(self) -> int:
        return int(self._clock() // _DAY_S)

    def clear_away(self) -> int:
        """
        Delete what is of no use: what broke off, what is too old, what is too much.

        Returns:
            Slots that are gone.
        """
        gone, left = 0, list[tuple[SlotFolder, dict[int, Link]]]()
        with self._janitor() as is_mine:
            for folder in self.folders() if is_mine else ():
                try:
                    num_gone, links = self._tidy(folder)
                except OSError:  # in use for long: it is counted as it is
                    num_gone, links = 0, folder.links()
                gone += num_gone
                left.append((folder, links))
            if is_mine:
                gone += self._shrink(left)
                with contextlib.suppress(OSError):
                    clear_broken_off(self.path, self._clock() - _HOUR_S)
        return gone

    @contextlib.contextmanager
    def _janitor(self) -> Iterator[bool]:
        """Whether this is the only one at it."""
        try:
            lock = os.open(self.path / ".janitor.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            yield False
            return
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_mine = True
            except OSError:  # another one's, or the file system has no locks
                is_mine = False
            yield is_mine
        finally:
            os.close(lock)

    def _tidy(self, folder: SlotFolder) -> tuple[int, dict[int, Link]]:
        """How many slots are gone, and what is left."""
        now, gone = self._clock(), 0
        with folder.locked():
            links = folder.links()
            whole = set(folder.numbers())
            for number in folder.files().keys() - links.keys():
                if number in whole:  # else a process was killed, which is no news
                    message = "KV slot %d of %s is damaged and deleted: no ids in it"
                    logger.warning(message, number, folder.path.name)
                folder.delete(number)
            for number in sorted(set(links) - _rooted(links)):
                folder.delete(number)
                gone += 1
                del links[number]
            while self.limits.ttl_s and (
                old := [
                    n for n in _leaves(links) if links[n].used < now - self.limits.ttl_s
                ]
            ):
                for number in old:
                    folder.delete(number)
                    gone += 1
                    del links[number]
            clear_broken_off(folder.path, now - _HOUR_S)
        return gone, links

    def _shrink(self, left: Sequence[tuple[SlotFolder, dict[int, Link]]]) -> int:
        """Under the cap: the leaf that was used longest ago goes, whoever's it is."""
        places = {folder.path: (folder, links) for folder, links in left}
        total = sum(k.num_bytes for _, links in places.values() for k in links.values())
        gone = 0
        while total > self.limits.max_bytes:
            leaves = [
                (links[n].used, path, n)
                for path, (_, links) in places.items()
                for n in _leaves(links)
            ]
            if not leaves:
                break
            _, path, number = min(leaves)
            folder, links = places[path]
            total -= links.pop(number).num_bytes
            with contextlib.suppress(OSError), folder.locked():
                if number in _leaves(folder.links()):
                    folder.delete(number)
                    gone += 1
        return gone

    def forget(
        self,
        model: str | None = None,
        forget_filter: ForgetFilter | None = None,
        but: Collection[Path] = (),
    ) -> tuple[int, int]:
        """
        Delete slots of all models, or of one; how many, and their bytes.

        Args:
            forget_filter: conversations that are forgotten; None: all.
            but: folders where that is done.
        Raises:
            OSError: some cannot be; the others are gone.
        """
        slots = num_bytes = 0
        failed: OSError | None = None
        for folder in self.folders():
            is_meant = model in (None, model_of(folder))
            if not is_meant or folder.path in but:
                continue
            try:
                found = forget(folder, forget_filter)
            except OSError as error:
                failed = error
                continue
            slots, num_bytes = slots + found[0], num_bytes + found[1]
        if failed is not None:
            raise failed
        if model is None and forget_filter is None:  # there is no turn to be hidden
            with SlotFolder(self.path).locked():
                (self.path / LOG_NAME).unlink(missing_ok=True)
        return slots, num_bytes


def model_of(folder: SlotFolder) -> str:
    """What the model of a folder is called; "" if nobody says."""
    try:
        return str(json.loads(read_private(folder.path / "model.json"))["model"])
    except (OSError, *MALFORMED):
        return ""


def _leaves(links: Mapping[int, Link]) -> list[int]:
    """Slots that none goes on from."""
    parents = {link.parent for link in links.values()}
    return [number for number, link in links.items() if link.uid not in parents]


def _rooted(links: Mapping[int, Link]) -> set[int]:
    """Slots whose chain reaches the beginning of a prompt."""
    found, uids = set[int](), {""}
    while new := {n for n, k in links.items() if k.parent in uids} - found:
        found |= new
        uids = {links[n].uid for n in new}
    return found
