"""Files of the user's: read, linked to, never written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.whole_files import replace_file


class Unreadable(Exception):
    """A file of the user's cannot be read as it must be; the message says which."""


def user_json(path: Path) -> dict[str, Any]:
    """
    An object of the user's; one that is not there is empty.

    Raises:
        Unreadable: it is no JSON object: what stands in it would be lost.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{path} must hold an object")
    return found


def linked_folder(his: Path, own: Path, but: tuple[str, ...]) -> Mapping[Path, Path]:
    """What a folder of ours links to, so that it is his, but for some names."""
    if not his.is_dir():
        return {}
    return {own / e.name: e.resolve() for e in his.iterdir() if e.name not in but}


def write_own(files: Mapping[Path, str], links: Mapping[Path, Path]) -> None:
    """
    Write files of ours for the user alone, and links to his.

    Raises:
        OSError: it cannot be done.
    """
    for link, goal in links.items():
        _make_folder(link.parent)
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(goal)
    for path, text in files.items():
        _make_folder(path.parent)
        replace_file(path, text.encode(), 0o600)


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
