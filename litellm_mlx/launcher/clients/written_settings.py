"""
A client's settings file written on request, and put back (`launch --write`, `--undo`).

The file is replaced whole, beside a copy of what it was; a journal of ours says what
was written. Whatever is in the way, the file stays as it is.
"""

import difflib
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients import json_file
from litellm_mlx.launcher.clients.user_files import Unreadable, write_own
from litellm_mlx.launcher.whole_files import replace_file

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

    def difference(self, secret: str) -> str:
        """What changes, line by line, without a secret."""
        before = (self.before or b"").decode(errors="replace")
        after = self.after.decode()
        name = str(self.path)
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), name, name, lineterm=""
        )
        return "\n".join(lines).replace(json.dumps(secret), '"***"') + "\n"


class Journal:
    """What was written for each client, in a folder of ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, client: str) -> dict[str, Any] | None:
        """What was noted; None: nothing was written."""
        path = self.path(client)
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
            if set(found) != {"path", "copy", "written", "keys"}:
                raise ValueError("it is no note of this program's")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise NotTouched(f"{path} cannot be read: {error}") from None
        return found

    def note(self, client: str, entry: Mapping[str, Any]) -> None:
        """Remember what is written, before it is."""
        write_own({self.path(client): json.dumps(entry)}, {})

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
    try:
        path = path.resolve()
    except RuntimeError:  # Python 3.11 and 3.12
        raise NotTouched(f"{path} is a link that leads to itself") from None
    before = None
    if os.path.lexists(path):
        _check_file(path)
        before = path.read_bytes()
    value = json_file.parsed(before or b"{}", path)
    for name, own in keys.items():
        if isinstance(own, Mapping) and not isinstance(value.get(name, {}), dict):
            raise Unreadable(f"{name} of {path} must be an object")
    after = json_file.printed(json_file.merged(value, keys), before or b"")
    return SettingsChange(path, before, after, keys)


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
    if status.st_nlink > 1:
        raise NotTouched(f"{path} has another name (a hard link), which would lose it")


def write(client: str, change: SettingsChange, journal: Journal) -> Path | None:
    """
    Write a change; the path of the copy of what was there.

    Raises:
        NotTouched: the file has changed meanwhile, or holds another change of ours.
        OSError: it cannot be written.
    """
    if journal.find(client) is not None:
        raise NotTouched(
            f"{change.path} was written before: launch --undo {client} first"
        )
    path, before = change.path, change.before
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = _MODE if before is None else stat.S_IMODE(path.stat().st_mode)
    copy = None
    if before is not None:
        at = time.strftime("%Y%m%d-%H%M%S")
        copy = path.with_name(f"{path.name}.litellm-mlx-{at}.bak")
        replace_file(copy, before, mode)
    entry = {
        "path": str(path),
        "copy": str(copy) if copy else None,
        "written": _digest(change.after),
        "keys": change.keys,
    }
    journal.note(client, entry)
    if (path.read_bytes() if path.exists() else None) != before:
        journal.drop(client)
        raise NotTouched(f"{path} has changed meanwhile; nothing was written")
    replace_file(path, change.after, mode)
    return copy


def undo(client: str, journal: Journal) -> str:
    """
    Put a client's file back; what was done, in words.

    Raises:
        NotTouched: it cannot be told apart what is whose; both versions are named.
        OSError: it cannot be written.
    """
    entry = journal.find(client)
    if entry is None:
        raise NotTouched(f"nothing was written for {client}")
    path, copy = Path(entry["path"]), entry["copy"] and Path(entry["copy"])
    try:
        now = path.read_bytes() if path.exists() else None
        before = copy.read_bytes() if copy else None
    except FileNotFoundError:
        raise NotTouched(
            f"{copy}, what {path} was, is gone; to let it be as it is, remove "
            f"{journal.path(client)}"
        ) from None
    if now == before:
        said = f"{path} is as it was"
    elif now is None:
        journal.drop(client)
        return f"{path} is gone; what it was: {copy}" if copy else f"{path} is gone"
    elif _digest(now) == entry["written"]:
        _put(path, before)
        said = f"{path} is as it was"
    else:
        _put(path, _rest(path, now, before, entry["keys"], copy))
        said = f"{path} has changed since: what was ours is taken out of it"
    journal.drop(client)
    if copy:
        copy.unlink(missing_ok=True)
    return said


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
