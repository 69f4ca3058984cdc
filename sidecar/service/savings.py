"""What reuse has saved: since the start, today, and since its file was begun."""

import datetime
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sidecar.service.kept_file import EVERY_S, KeptFile, read_kept
from sidecar.service.request_history import Work

_MAX_DAYS = 31
_NAME = "what reuse has saved"


class Savings:
    """
    Sums of work by day. Any thread.

    Args:
        file: where they outlive the process. done: gives the work since the start.
        today: gives the date. every_s: how often the file is written at most.
    """

    def __init__(
        self,
        file: Path,
        done: Callable[[], Work],
        today: Callable[[], datetime.date] = datetime.date.today,
        every_s: float = EVERY_S,
    ) -> None:
        self._done, self._today = done, today
        self._counted = Work()
        empty: tuple[Work, dict[str, Work], str] = Work(), {}, ""
        self._total, self._days, since = read_kept(file, _NAME, _parsed, empty)
        self._since = since or today().isoformat()
        self._lock = threading.Lock()
        self._kept = KeptFile(file, _NAME, self._content, every_s)

    def as_dict(self) -> dict[str, Any]:
        """The three sums, and the day on which the last was begun."""
        with self._lock:
            self._count()
            today = self._days.get(self._today().isoformat(), Work())
            return {
                "start": self._counted.as_dict(),
                "today": today.as_dict(),
                "total": self._total.as_dict(),
                "since": self._since,
            }

    def close(self) -> None:
        """Write what has moved, and stop; repeatable."""
        self._kept.close()

    def _count(self) -> None:
        """Add what was done since the last look to the day."""
        done, day = self._done(), self._today().isoformat()
        work, self._counted = done - self._counted, done
        if work == Work():
            return
        self._total += work
        self._days[day] = self._days.get(day, Work()) + work
        for old in sorted(self._days)[:-_MAX_DAYS]:
            del self._days[old]

    def _content(self) -> dict[str, Any]:
        with self._lock:
            self._count()
            return {
                "since": self._since,
                "total": asdict(self._total),
                "days": {day: asdict(work) for day, work in self._days.items()},
            }


def _parsed(kept: Any) -> tuple[Work, dict[str, Work], str]:
    days = {str(day): Work(**work) for day, work in kept["days"].items()}
    return Work(**kept["total"]), days, str(kept["since"])
