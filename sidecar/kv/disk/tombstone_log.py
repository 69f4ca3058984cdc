"""
The file of the tombstones: lines are appended, and read by every process.

What the lines say stands in memory/tombstones. A line that was cut off by a crash is
none; the next one begins on a line of its own.
"""

import os
import secrets
from dataclasses import dataclass

from sidecar.kv.disk.durable_files import (
    make_durable,
    open_regular,
    replace_private,
    sync_folder,
)
from sidecar.kv.disk.ports import Marks
from sidecar.kv.disk.slot_folder import SlotFolder

LOG_NAME = "tombstones.log"
_MAX_LINE = 100
_MAX_BYTES = 16 << 20  # then it is written anew, with what is known


@dataclass(frozen=True, slots=True)
class _Position:
    """How far a file was read, and its first line: another file has another one."""

    first_line: bytes = b""
    offset: int = 0


class TombstoneLog:
    """
    Of all models, read for one. Not thread-safe.

    Args:
        folder: the root's. max_bytes: of the file. For tests.
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
            number = open_regular(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._begin_again()
            return
        with os.fdopen(number, "rb") as file:
            size = os.fstat(number).st_size
            first_line = file.readline(_MAX_LINE)
            if first_line != self._read.first_line:
                self._begin_again()
            start = self._read.offset
            if size <= start:
                return
            file.seek(start)
            data = file.read(min(size - start, 4 * self._max_bytes))
        whole = data[: data.rfind(b"\n") + 1]
        self._marks.learn(whole.decode("ascii", "replace").splitlines())
        self._read = _Position(first_line, start + len(whole))

    def _begin_again(self) -> None:
        """Another file, or none: what is known here may not stand in it."""
        if self._read.offset:
            self._marks.write_again()
        self._read = _Position()

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
                # Another first line: readers begin again.
                first_line = f"# {secrets.token_hex(16)}"
                text = _text([first_line, *self._marks.lines()])
                replace_private(self._path, text, is_durable=True)
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
        number = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with os.fdopen(number, "rb+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                data = data if file.read(1) == b"\n" else b"\n" + data
            while data:  # a disk that fills takes a part, and then none
                data = data[file.write(data) :]
            make_durable(file)
        if is_new:
            sync_folder(self._folder.path)


def _text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
