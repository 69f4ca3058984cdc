"""
A client's settings file written on request, and put back (`launch --write`, `--undo`).

The file is replaced whole, beside a copy of what it was; a journal of ours says what
was written. Whatever is in the way, the file stays as it is.
"""

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients import json_file
from litellm_mlx.launcher.clients.user_files import Unreadable, write_own
from litellm_mlx.launcher.whole_files import replace_file

_NOTED = {"path", "copy", "was", "written", "keys"}
_MODE = 0o600  # of a file that was not there: it holds a key


class NotTouched(Exception):
    """A file is not touched; the message says why."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """
    What a file is to become.

    Args:
        path: the file itself, links followed. before: its bytes; None: it is not there.
        keys: what is added to it.
    """

    path: Path
    before: bytes | None
    after: bytes
    keys: Mapping[str, Any]

    def difference(self) -> str:
        """What changes, line by line, without the values of keys and tokens."""
        before, after = (
            json_file.without_secrets(text.decode()).splitlines()
            for text in (self.before or b"", self.after)
        )
        name = str(self.path)
        lines = difflib.unified_diff(before, after, name, name, lineterm="")
        return "\n".join(lines) + "\n"


class Journal:
    """What was written for each client, in a folder of ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, client: str) -> dict[str, Any] | None:
        """What was noted; None: nothing was written."""
        path = self.path(client)
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
            if set(found) != _NOTED:
                raise ValueError("it is no note of this program's")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise NotTouched(f"{path} cannot be read: {error}") from None
        return found

    def note(self, client: str, entry: Mapping[str, Any]) -> None:
        """Remember what is written, before it is."""
        write_own({self.path(client): json.dumps(entry)}, {})

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """
        Keep other processes from writing or undoing meanwhile.

        Raises:
            NotTouched: another one is at it.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotTouched("another --write or --undo is under way") from None
            yield

    def check_free(self, client: str) -> None:
        """
        Whether a client's settings hold no change of ours.

        Raises:
            NotTouched: they do.
        """
        if (entry := self.find(client)) is not None:
            undoing = f"launch --undo {client}"
            raise NotTouched(f"{entry['path']} was written before: {undoing} first")

    def drop(self, client: str) -> None:
        """Forget it."""
        self.path(client).unlink(missing_ok=True)

    def path(self, client: str) -> Path:
        """The file of a client's note."""
        return self._folder / f"{client}.json"


def planned(path: Path, keys: Mapping[str, Any]) -> SettingsChange:
    """
    What the file is to become.

    Raises:
        Unreadable: it is no strict JSON.
        NotTouched: it may not be written.
    """
    path = _resolved(path)
    before = None
    if os.path.lexists(path):
        _check_file(path)
        before = path.read_bytes()
    value = json_file.parsed(before or b"{}", path)
    _check_objects(value, keys, path)
    after = json_file.printed(json_file.merged(value, keys), before or b"")
    return SettingsChange(path, before, after, keys)


def _resolved(path: Path) -> Path:
    """
    The file that links lead to.

    Raises:
        NotTouched: they lead nowhere.
    """
    try:
        return path.resolve()
    except RuntimeError:  # Python 3.11 and 3.12
        raise NotTouched(f"{path} is a link that leads to itself") from None


def _check_objects(
    value: Mapping[str, Any], keys: Mapping[str, Any], path: Path
) -> None:
    """
    Whether objects stand where keys are to be added to objects.

    Raises:
        Unreadable: something else would be lost.
    """
    for name, own in keys.items():
        if not isinstance(own, Mapping) or name not in value:
            continue
        if not isinstance(value[name], dict):
            raise Unreadable(f"{name} of {path} must be an object")
        _check_objects(value[name], own, path)


def _check_file(path: Path) -> None:
    """
    Whether another file may take the place of this one.

    Raises:
        NotTouched: it may not.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise NotTouched(f"{path} is no plain file")
    if not status.st_mode & stat.S_IWUSR:
        raise NotTouched(f"{path} is read-only")
    if status.st_uid != os.geteuid():
        raise NotTouched(f"{path} belongs to somebody else")
    if status.st_nlink > 1:
        raise NotTouched(f"{path} has another name (a hard link), which would lose it")


def write(client: str, change: SettingsChange, journal: Journal) -> Path | None:
    """
    Write a change; the path of the copy of what was there.

    Raises:
        NotTouched: the file has changed meanwhile, or holds another change of ours.
        OSError: it cannot be written.
    """
    with journal.locked():
        journal.check_free(client)
        path, before = change.path, change.before
        if (path.read_bytes() if path.exists() else None) != before:
            raise NotTouched(f"{path} has changed meanwhile; nothing was written")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = _MODE if before is None else stat.S_IMODE(path.stat().st_mode)
        copy = None if before is None else _copy_path(path)
        entry = {
            "path": str(path),
            "copy": copy and str(copy),
            "was": None if before is None else _digest(before),
            "written": _digest(change.after),
            "keys": change.keys,
        }
        try:
            if copy and before is not None:
                replace_file(copy, before, mode)
            journal.note(client, entry)
            replace_file(path, change.after, mode)
        except OSError:
            journal.drop(client)
            if copy:
                copy.unlink(missing_ok=True)
            raise
    return copy


def _copy_path(path: Path) -> Path:
    at = time.strftime("%Y%m%d-%H%M%S")
    return path.with_name(f"{path.name}.litellm-mlx-{at}.bak")


def undo(client: str, journal: Journal) -> str:
    """
    Put a client's file back; what was done, in words.

    Raises:
        NotTouched: it cannot be told apart what is whose; both versions are named.
        OSError: it cannot be written.
    """
    with journal.locked():
        entry = journal.find(client)
        if entry is None:
            raise NotTouched(f"nothing was written for {client}")
        said = _undone(entry, journal.path(client))
        journal.drop(client)
    return said


def _undone(entry: Mapping[str, Any], note: Path) -> str:
    """Put the file of a note back; what was done, in words."""
    path, copy = _resolved(Path(entry["path"])), entry["copy"] and Path(entry["copy"])
    now = None
    if os.path.lexists(path):
        _check_file(path)
        now = path.read_bytes()
    before = copy.read_bytes() if copy and copy.exists() else None
    if copy and (before is None or _digest(before) != entry["was"]):
        why = "gone" if before is None else "no longer what it was"
        raise NotTouched(
            f"{copy}, the copy of {path}, is {why}; to leave both as they are, remove "
            f"{note}"
        )
    if now != before:
        if now is None:
            return f"{path} is gone; what it was: {copy}"
        if _digest(now) != entry["written"]:
            _put(path, _rest(path, now, before, entry["keys"], copy))
            kept = f"; what it was: {copy}" if copy else ""
            return f"{path} has changed since: what was ours is taken out of it{kept}"
        _put(path, before)
    if copy:
        copy.unlink()
    return f"{path} is as it was"


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
    else:
        replace_file(path, data, stat.S_IMODE(path.stat().st_mode))


def _rest(
    path: Path,
    now: bytes,
    before: bytes | None,
    keys: Mapping[str, Any],
    copy: Path | None,
) -> bytes:
    """What others have made of the file, without our keys."""
    try:
        value = json_file.parsed(now, path)
    except Unreadable as error:
        was = f"what it was before: {copy}" if copy else "it was not there before"
        raise NotTouched(f"{error}; put it right by hand ({was})") from None
    was_value = json_file.parsed(before or b"{}", path)
    return json_file.printed(json_file.without(value, keys, was_value), now)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
