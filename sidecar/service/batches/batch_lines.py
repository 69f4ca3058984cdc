"""The lines of a batch: what its file asks, and what was answered before."""

import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.core.json_bytes import dump_bytes, load_bytes
from sidecar.kv.disk.durable_files import make_durable, open_regular, sync_folder

_MAX_LINES = 50_000
_MAX_ERRORS = 100
_MAX_ID_CHARS = 512
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Where one request stands in its file, and its client's name for it."""

    custom_id: str
    start: int
    end: int

    def body(self, path: Path) -> bytes:
        """What is asked, as JSON."""
        with path.open("rb") as file:
            file.seek(self.start)
            return dump_bytes(load_bytes(file.read(self.end - self.start))["body"])


class BadLines(Exception):
    """
    A file that is no batch.

    Args:
        errors: each with its line, from 1.
    """

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("the file is no batch")
        self.errors = errors


def read_lines(path: Path, endpoint: str) -> list[BatchLine]:
    """
    The requests of a file.

    Raises:
        BadLines: it has others than requests for one endpoint, or none, or too many.
        OSError: it cannot be read.
    """
    found, errors, names = list[BatchLine](), list[dict[str, Any]](), set[str]()
    for number, start, data in _pieces(path):
        if len(found) + len(errors) >= _MAX_LINES:
            errors = [_error(f"a batch has at most {_MAX_LINES} requests", number)]
            break
        try:
            name = _custom_id(data, endpoint)
            if name in names:
                raise ValueError(f"custom_id {name[:64]!r} is there twice")
        except ValueError as error:
            errors.append(_error(str(error), number))
            if len(errors) >= _MAX_ERRORS:
                break
            continue
        names.add(name)
        found.append(BatchLine(name, start, start + len(data)))
    if not (found or errors):
        errors = [_error("the file has no requests", None)]
    if errors:
        raise BadLines(errors)
    return found


def _pieces(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Lines that are not blank: their numbers, from 1, and where each begins."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            mark = len(BOM_UTF8) if number == 1 and line.startswith(BOM_UTF8) else 0
            if line[mark:].strip():
                yield number, start + mark, line[mark:]
            start += len(line)


def _error(message: str, line: int | None) -> dict[str, Any]:
    return {"code": "invalid_request", "message": message, "param": None, "line": line}


def _custom_id(data: bytes, endpoint: str) -> str:
    """
    The name of a request.

    Raises:
        ValueError: it is none for this endpoint.
    """
    try:
        asked = load_bytes(data)
    except ValueError:
        raise ValueError("the line is not valid JSON") from None
    if not isinstance(asked, dict):
        raise ValueError("the line must be an object")
    if unknown := asked.keys() - _FIELDS:
        raise ValueError(f"{min(unknown)[:64]} is no field of a request")
    name = asked.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID_CHARS:
        raise ValueError(f"custom_id must be a text of 1..{_MAX_ID_CHARS} characters")
    if asked.get("method") != "POST":
        raise ValueError("method must be POST")
    if asked.get("url") != endpoint:
        raise ValueError(f"url must be {endpoint}, the endpoint of the batch")
    if not isinstance(asked.get("body"), dict):
        raise ValueError("body must be an object")
    return name


class AnswerFile:
    """
    Answers, a line each; one that is here is on the disk itself. One thread at a time.

    Args:
        path: a file of an earlier run is gone on with: a line that its end broke off
            is cut away, so that no answer is there in part or twice.
    """

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        number = open_regular(path, os.O_RDWR | os.O_CREAT)
        self._file = os.fdopen(number, "r+b", buffering=0)
        self.answered: set[str] = set()
        self._file.truncate(self._read())
        self._file.seek(0, os.SEEK_END)
        if is_new:
            sync_folder(path.parent)

    def _read(self) -> int:
        """Note whose answers are whole; where the last of them ends."""
        end = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb") as lines:
            lines.seek(0)
            for line in lines:
                try:
                    if not line.endswith(b"\n"):
                        break
                    self.answered.add(load_bytes(line)["custom_id"])
                except (ValueError, TypeError, KeyError):
                    break
                end += len(line)
        return end

    def append(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """
        Keep answers, each with its `custom_id`.

        Raises:
            OSError: they cannot be written; nothing of them is here.
        """
        start = self._file.seek(0, os.SEEK_END)
        try:
            whole = memoryview(b"".join(dump_bytes(one) + b"\n" for one in answers))
            while whole:
                whole = whole[self._file.write(whole) or 0 :]
            make_durable(self._file)
        except OSError:
            self._file.truncate(start)
            raise
        self.answered.update(one["custom_id"] for one in answers)

    def close(self) -> None:
        """Repeatable."""
        self._file.close()


def left_over(
    lines: Sequence[BatchLine], *files: AnswerFile
) -> list[BatchLine]:  # fmt: skip
    """The requests that none of the files answers."""
    return [
        line
        for line in lines
        if not any(line.custom_id in file.answered for file in files)
    ]
