"""Counts where prompts stop sharing their beginning, and what that costs."""

import threading
from collections import OrderedDict
from typing import Any

from sidecar.core.prompt import Divergence

_MAX_PLACES = 512


class DriftReport:
    """Recurring places of divergence. Any thread."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[str, str, str], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, agent: str | None, place: Divergence, num_prefilled: int) -> None:
        """Count a divergence and the tokens prefilled because of it."""
        key = (agent or "-", place.role, place.before[:16])
        with self._lock:
            entry = self._places.setdefault(
                key,
                {"agent": key[0], "role": place.role, "times": 0, "prefilled": 0},
            )
            entry["times"] += 1
            entry["prefilled"] += num_prefilled
            entry["before"], entry["now"] = place.before, place.now
            self._places.move_to_end(key)
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._places.clear()

    def rows(self) -> list[dict[str, Any]]:
        """Places by the tokens they cost, the dearest first."""
        with self._lock:
            rows = [dict(entry) for entry in self._places.values()]
        return sorted(rows, key=lambda row: row["prefilled"], reverse=True)
