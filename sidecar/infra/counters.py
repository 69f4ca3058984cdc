"""Named event counts that a part of the program keeps and /metrics shows."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

# Of a store and its pipeline: docs/metrics.md says what each means.
HEALTHY_AT_ZERO = (
    "alignment_unavailable", "exact_key_rejected_by_model_lcp", "hybrid_trim_miss",
    "invariant_violation", "splice_unavailable", "watchdog_abort",
)  # fmt: skip


class Counters:
    """Counts by name. Any thread."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` events."""
        with self._lock:
            self._counts[name] += amount

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Count several, in one go."""
        with self._lock:
            self._counts.update(amounts)

    def snapshot(self) -> dict[str, int]:
        """All counts now."""
        with self._lock:
            return dict(self._counts)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]
