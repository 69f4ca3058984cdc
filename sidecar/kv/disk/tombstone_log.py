"""
The file of a model's tombstones: lines are appended, and read by every process.

What the lines say stands in memory/tombstones. A line that was cut off by a crash is
none; the next one begins on a line of its own.
"""

import os
import secrets
from dataclasses import dataclass

from sidecar.kv.disk.durable_files import make_durable, open_private, sync_folder
from sidecar.kv.disk.ports import Marks
from sidecar.kv.disk.slot_folder import LOG_NAME, SlotFolder

_MAX_LINE = 100
_MAX_BYTES = 16 << 20  # then it is written anew, with what is known


@dataclass(frozen=True, slots=True)
class _Position:
    """How far a file was read, and its first line: another file has another one."""

    first_line: bytes = b""
    offset: int = 0


class TombstoneLog:
    """
    Of one model's folder. Its owner locks.

    Args:
        max_bytes: of the file. For tests.
    """

    def __init__(
        self, folder: SlotFolder, marks: Marks, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._folder = folder
        self._path = folder.path / LOG_NAME
        self._marks = marks
        self._max_bytes = max_bytes
        self._read = _Position()

    def read(self) -> None:
        """
        Learn what was added since, by whatever process.

        Raises:
            OSError: it cannot be read.
        """
        try:
            number = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with os.fdopen(number, "rb") as file:
            size = os.fstat(number).st_size  # 0 if it is a pipe
            first_line = file.readline(_MAX_LINE) if size else b""
            is_same = first_line == self._read.first_line
            start = self._read.offset if is_same else 0
            if size <= start:
                return
            file.seek(start)
            data = file.read(min(size - start, 4 * self._max_bytes))
        whole = data[: data.rfind(b"\n") + 1]
        self._marks.learn(whole.decode("ascii", "replace").splitlines())
        self._read = _Position(first_line, start + len(whole))

    def write(self) -> None:
        """
        Add what is not there yet, on the disk itself.

        Raises:
            OSError: it cannot be, now.
        """
        lines = self._marks.unlogged()
        if not lines:
            return
        with self._folder.locked():
            if self._size() > self._max_bytes:
                self.read()
                self._replace(_text(self._marks.lines()))
            else:
                self._append(_text(lines))
        self._marks.logged(lines)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _append(self, data: bytes) -> None:
        is_new = not self._path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(self._path, flags, 0o600), "rb+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                data = data if file.read(1) == b"\n" else b"\n" + data
            file.write(data)
            make_durable(file)
        if is_new:
            sync_folder(self._folder.path)

    def _replace(self, data: bytes) -> None:
        new = self._path.with_name(
            f".tmp-{os.getpid()}-{secrets.token_hex(6)}-{LOG_NAME}"
        )
        try:
            with open_private(new) as file:
                file.write(data)
                make_durable(file)
            new.replace(self._path)
            sync_folder(self._folder.path)
        finally:
            new.unlink(missing_ok=True)


def _text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
