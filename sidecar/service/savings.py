"""
What reuse has saved: since the start, today, and since this file was begun.

A thread looks each half minute whether the sums have moved, and writes them then: what
is killed before that is lost.
"""

import datetime
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sidecar.kv.disk.durable_files import MALFORMED, read_private, replace_private
from sidecar.service.request_history import Work

logger = logging.getLogger(__name__)

_EVERY_S = 30.0
_MAX_DAYS = 31


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
        every_s: float = _EVERY_S,
    ) -> None:
        self._file, self._done, self._today = file, done, today
        self._counted, self._written = Work(), Work()
        self._total, self._days, since = _read(file)
        self._since = since or today().isoformat()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._every_s = every_s
        self._thread = threading.Thread(target=self._run, name="savings", daemon=True)
        self._thread.start()

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
        self._is_over.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._write()

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

    def _write(self) -> None:
        with self._lock:
            self._count()
            if self._counted == self._written:
                return
            self._written = self._counted
            kept = {
                "since": self._since,
                "total": asdict(self._total),
                "days": {day: asdict(work) for day, work in self._days.items()},
            }
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_private(self._file, json.dumps(kept).encode())
        except OSError as error:
            logger.warning("what reuse has saved is not kept: %s", error)


def _read(file: Path) -> tuple[Work, dict[str, Work], str]:
    """What was kept; a damaged file counts as none."""
    try:
        kept = json.loads(read_private(file))
        days = {str(day): Work(**work) for day, work in kept["days"].items()}
        return Work(**kept["total"]), days, str(kept["since"])
    except FileNotFoundError:
        pass
    except (OSError, *MALFORMED) as error:
        logger.warning("what reuse has saved cannot be read from %s: %s", file, error)
    return Work(), {}, ""
