"""Files of the user's: read, linked to, never written."""

import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import json5

from litellm_mlx.launcher.whole_files import replace_file


class Unreadable(Exception):
    """A file of the user's cannot be read as it must be; the message says which."""


def user_json(path: Path) -> dict[str, Any]:
    """
    An object of the user's, comments and all; one that is not there is empty.

    Raises:
        Unreadable: it is no JSON object: what stands in it would be lost.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would never end
            raise Unreadable(f"{path} is no file")
        text = path.read_text("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from None
    return object_in(text, str(path)) if text.strip() else {}


def readable_json(path: Path) -> dict[str, Any]:
    """The same; one that cannot be read is empty: its client says so itself."""
    try:
        return user_json(path)
    except Unreadable:
        return {}


def named_json(value: str) -> dict[str, Any]:
    """An object that the user gives: itself, or a file's path."""
    if value.lstrip().startswith("{"):
        return object_in(value, "--settings")
    try:
        is_file = Path(value).is_file()
    except (OSError, ValueError):  # too long for a name
        is_file = False
    if not is_file:  # what was given may hold a key
        raise Unreadable("--settings must be an object, or a file that is there")
    return user_json(Path(value))


def object_in(text: str, name: str) -> dict[str, Any]:
    """
    An object of JSON, or of JSON5: clients take comments in their files.

    Args:
        name: where it stands, for the error.
    Raises:
        Unreadable: it is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = json5.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"{name} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{name} must hold an object")
    return found


def linked_folder(his: Path, own: Path, but: tuple[str, ...]) -> Mapping[Path, Path]:
    """What a folder of ours links to, so that it is his, but for some names."""
    if not his.is_dir():
        return {}
    return {own / e.name: e.resolve() for e in his.iterdir() if e.name not in but}


def write_own(files: Mapping[Path, str], links: Mapping[Path, Path]) -> None:
    """
    Write files of ours for the user alone, and links to his.

    What a client made in our folder before the user had it himself gives way: what a
    folder holds goes into his, a file goes aside.

    Raises:
        OSError: it cannot be done.
    """
    for folder in {path.parent for path in files}:
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.is_symlink() and entry not in links:
                entry.unlink()  # he has it no more
    for link, goal in links.items():
        _make_folder(link.parent)
        if link.is_symlink():
            link.unlink()
        elif link.is_dir() and goal.is_dir():
            _move_into(link, goal)
        elif link.exists():
            link.replace(_free(link.with_name(f"{link.name}.before")))
        link.symlink_to(goal)
    for path, text in files.items():
        _make_folder(path.parent)
        replace_file(path, text.encode(), 0o600)


def _move_into(own: Path, his: Path) -> None:
    """Move what a folder of ours holds, under another name where his is taken."""
    for entry in own.iterdir():
        goal = his / entry.name
        if entry.is_dir() and goal.is_dir():
            _move_into(entry, goal)
        else:
            shutil.move(entry, _free(goal))
    own.rmdir()


def _free(path: Path) -> Path:
    """This path, or the first like it that is not taken."""
    numbered = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in range(2, 1000))
    return next(p for p in (path, *numbered) if not os.path.lexists(p))


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
