"""The last lines of the log, for people who look on over HTTP."""

import logging
import threading
from collections import deque
from typing import Any

from sidecar.infra.logs import printable, request_id

_MAX_LINES = 2000
_MAX_CHARS = 2000


class RecentLines(logging.Handler):
    """Keeps the last 2,000 records as text. Any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[dict[str, Any]] = deque(maxlen=_MAX_LINES)
        self._number = 0
        self._lines_lock = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; nothing in it begins a line of its own."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            text = str(record.msg)
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({record.exc_info[1]!r})"
        with self._lines_lock:
            self._number += 1
            self._lines.append(
                {
                    "n": self._number,
                    "at": record.created,
                    "level": record.levelname,
                    "request": request_id.get(),
                    "text": printable(text)[:_MAX_CHARS],
                }
            )

    def after(self, number: int, maximum: int) -> list[dict[str, Any]]:
        """The newest lines with higher numbers, at most so many, oldest first."""
        with self._lines_lock:
            found = [line for line in self._lines if line["n"] > number]
        return found[-maximum:]
