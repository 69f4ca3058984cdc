"""Files for their owner alone, and files that are on the disk itself."""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# what reading a file's JSON raises that somebody else wrote, or damaged
MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)


@contextlib.contextmanager
def open_private(path: Path) -> Iterator[BinaryIO]:
    """A new file that its owner alone may read."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(number, "wb") as file:
        yield file


def read_private(path: Path) -> bytes:
    """
    What a small file holds.

    Raises:
        OSError: it cannot be read, or is no file: a pipe would never end.
    """
    number = open_regular(path, os.O_RDONLY)
    with os.fdopen(number, "rb") as file:
        return file.read(_MAX_BYTES)


def open_regular(path: Path, flags: int) -> int:
    """
    Open a file that is one; the number is the caller's to close.

    Raises:
        OSError: it cannot be, or is a folder, a link or a pipe.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    number = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name} is no file")
    return number


def replace_private(path: Path, data: bytes, *, is_durable: bool = False) -> None:
    """
    Have a file hold this, or what it held before, for its owner alone.

    Args:
        is_durable: it is on the disk itself when this returns.
    """
    new = path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(6)}-{path.name}")
    try:
        with open_private(new) as file:
            file.write(data)
            if is_durable:
                make_durable(file)
        new.replace(path)
        if is_durable:
            sync_folder(path.parent)
    finally:
        new.unlink(missing_ok=True)


_MAX_BYTES = 16 << 20
_OURS = re.compile(r"\.tmp-\d+-[0-9a-f]{12}-.+|slot_\d+_[0-9a-f]{8}\.bad")


def clear_broken_off(folder: Path, before: float) -> None:
    """Delete what was being written, or put aside, before a time."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()


def make_durable(file: BinaryIO) -> None:
    """Have a file's bytes on the disk itself."""
    file.flush()
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync leaves them in the drive
    if full is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(file.fileno(), full)
            return
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have a folder's names on the disk itself."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
