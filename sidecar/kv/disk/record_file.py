"""A file of small records by name, for what is found out once and kept."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidecar.kv.disk.durable_files import read_private, replace_private


class RecordFile:
    """
    Records as JSON. Any thread of one process; of two the last write stays.

    Args:
        file: where they are kept; None: nowhere. maximum: of records; the newest stay.
    """

    def __init__(self, file: Path | None, maximum: int) -> None:
        self._file, self._maximum = file, maximum

    def find(self, key: str) -> Any:
        """A record; None: there is none, or the file cannot be read."""
        return self._read().get(key)

    def keep(self, key: str, record: Any) -> None:
        """Remember a record; a disk that is full or read-only is no matter."""
        records = {name: one for name, one in self._read().items() if name != key}
        records[key] = record
        self._write(dict(list(records.items())[-self._maximum :]))

    def drop(self, key: str) -> None:
        """Forget a record."""
        records = self._read()
        if records.pop(key, None) is not None:
            self._write(records)

    def _read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            known = json.loads(read_private(self._file))
            return known if isinstance(known, dict) else {}
        return {}

    def _write(self, records: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_private(self._file, json.dumps(records).encode())
