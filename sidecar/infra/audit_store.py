"""
Rows of who asked what when, in SQLite; never what was said.

One thread writes; any thread reads. A damaged database is set aside; a file that is
none is left alone.
"""

import contextlib
import dataclasses
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

_BUSY_S = 2.0
_MAGIC = b"SQLite format 3\0"
_DAY_S = 86400.0
_STEPS_OF_CLEANING = 20


@dataclass(frozen=True, slots=True)
class AuditRow:
    """
    One call.

    Args:
        at: Unix seconds of its end. kind: `admin` for what changes the server.
        client: the program. key_id: a name for the key, not the key.
        outcome: how it ended. error_type: code of the error.
        cause: why it was not warm.
    """

    at: float
    kind: Literal["request", "admin"]
    request_id: str
    endpoint: str
    address: str
    status: int
    outcome: str
    duration_ms: int
    model: str | None = None
    client: str | None = None
    key_id: str | None = None
    error_type: str | None = None
    ttft_ms: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    cause: str | None = None
    trace_id: str | None = None


COLUMNS = tuple(field.name for field in dataclasses.fields(AuditRow))
_CREATE = (
    "CREATE TABLE IF NOT EXISTS calls (id INTEGER PRIMARY KEY AUTOINCREMENT, "
    f"{', '.join(COLUMNS)})"
)
_INDEX = "CREATE INDEX IF NOT EXISTS calls_at ON calls (at)"
_INSERT = (
    f"INSERT INTO calls ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
)


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """
    Which rows; None: any.

    Args:
        since, until: Unix seconds. after: ids beyond that one, the oldest first.
    """

    model: str | None = None
    status: int | None = None
    since: float | None = None
    until: float | None = None
    after: int | None = None

    def where(self) -> tuple[str, list[Any]]:
        """The same in SQL, and its values."""
        tests = {
            "model = ?": self.model,
            "status = ?": self.status,
            "at >= ?": self.since,
            "at <= ?": self.until,
            "id > ?": self.after,
        }
        given = {test: value for test, value in tests.items() if value is not None}
        words = f" WHERE {' AND '.join(given)}" if given else ""
        return words, [*given.values()]


class AuditStore:
    """
    The rows of one file. Any thread.

    Args:
        days, max_bytes: what is kept at most; 0 days: for ever. clean_every_s: how
            often that is looked after.
        clock: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        days: float,
        max_bytes: int,
        clean_every_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._days, self._max_bytes = path, days, max_bytes
        self._clean_every_s = clean_every_s
        self._clock = clock
        self._cleaned_at: float | None = None

    def write(self, rows: Sequence[AuditRow]) -> None:
        """
        Add rows; one thread at a time.

        Raises:
            OSError: they are lost.
        """
        try:
            self._add(rows)
        except sqlite3.OperationalError as error:
            raise OSError(f"{self._path.name}: {error}") from error
        except sqlite3.DatabaseError as error:
            self._set_aside(error)
            self._add(rows)
        try:
            self._clean()
        except sqlite3.Error as error:  # the rows are there
            logger.warning("%s: is not cleaned: %s", self._path.name, error)

    def _add(self, rows: Sequence[AuditRow]) -> None:
        with contextlib.closing(self._prepared()) as store, store:
            store.executemany(_INSERT, [_values(row) for row in rows])

    def rows(
        self, asked: AuditFilter, limit: int, offset: int = 0
    ) -> list[dict[str, Any]]:
        """
        Rows, the newest first (behind an id: the oldest first).

        Raises:
            OSError: they cannot be read.
        """
        order = "ASC" if asked.after is not None else "DESC"
        where, values = asked.where()
        query = f"SELECT * FROM calls{where} ORDER BY id {order} LIMIT ? OFFSET ?"
        return self._read(query, [*values, limit, offset])

    def stats(self, asked: AuditFilter) -> list[dict[str, Any]]:
        """
        Sums by model, endpoint and status.

        Raises:
            OSError: they cannot be read.
        """
        where, values = asked.where()
        query = (
            "SELECT model, endpoint, status, COUNT(*) AS calls, "
            "SUM(prompt_tokens) AS prompt_tokens, SUM(cached_tokens) AS cached_tokens, "
            "SUM(completion_tokens) AS completion_tokens, "
            "AVG(duration_ms) AS mean_duration_ms, AVG(ttft_ms) AS mean_ttft_ms "
            f"FROM calls{where} GROUP BY model, endpoint, status ORDER BY calls DESC"
        )
        return self._read(query, values)

    def _read(self, query: str, values: list[Any]) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        try:
            with contextlib.closing(self._open()) as store:
                store.row_factory = sqlite3.Row
                return [dict(row) for row in store.execute(query, values)]
        except sqlite3.Error as error:
            if "no such table" in str(error):  # it is being made
                return []
            raise OSError(f"{self._path.name}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=_BUSY_S)

    def _prepared(self) -> sqlite3.Connection:
        """The store, its owner's alone."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK  # a pipe must not hold it
        with open(os.open(self._path, flags, 0o600), "rb") as file:
            os.fchmod(file.fileno(), 0o600)
            head = file.read(len(_MAGIC))
        if head and head != _MAGIC:
            raise OSError(f"{self._path.name}: it is no SQLite database")
        store = self._open()
        try:
            if not head:
                store.execute("PRAGMA auto_vacuum=INCREMENTAL")
            store.execute("PRAGMA journal_mode=WAL")
            store.execute(_CREATE)
            store.execute(_INDEX)
        except BaseException:
            store.close()
            raise
        return store

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        aside = self._path.with_suffix(f".damaged-{int(self._clock())}")
        os.replace(self._path, aside)
        for end in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}{end}")
        logger.warning("%s: %s: it is kept as %s", self._path, error, aside.name)

    def _clean(self) -> None:
        """Now and then: let go of what is too old, then of what is too much."""
        now, last = self._clock(), self._cleaned_at
        if last is not None and now - last < self._clean_every_s:
            return
        self._cleaned_at = now
        with contextlib.closing(self._open()) as store:
            if self._days:
                oldest = now - self._days * _DAY_S
                with store:
                    store.execute("DELETE FROM calls WHERE at < ?", [oldest])
            for _ in range(_STEPS_OF_CLEANING):
                if _num_bytes(store) <= self._max_bytes:
                    break
                with store:
                    store.execute(
                        "DELETE FROM calls WHERE id IN (SELECT id FROM calls ORDER BY "
                        "id LIMIT (SELECT MAX(1, COUNT(*) / 10) FROM calls))"
                    )
            store.execute("PRAGMA incremental_vacuum").fetchall()


def _num_bytes(store: sqlite3.Connection) -> int:
    """Of the pages that hold something."""
    (pages,) = store.execute("PRAGMA page_count").fetchone()
    (free,) = store.execute("PRAGMA freelist_count").fetchone()
    (size,) = store.execute("PRAGMA page_size").fetchone()
    return int((pages - free) * size)


def _values(row: AuditRow) -> list[Any]:
    return [getattr(row, name) for name in COLUMNS]
