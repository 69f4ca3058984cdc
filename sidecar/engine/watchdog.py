"""When a generation has to end: no progress for long, or too long in all."""

import time


class Watchdog:
    """
    Two limits on a running generation; the time in the queue does not count.

    Args:
        stall_s: GENERATION_WATCHDOG_SECONDS without a prefill chunk or a token.
        deadline_s: GENERATION_DEADLINE_SECONDS of wall clock in all. 0 is off.
    """

    def __init__(self, stall_s: float, deadline_s: float) -> None:
        self._stall_s = stall_s
        self._deadline_s = deadline_s

    def is_over(self, began: float, last_progress: float) -> bool:
        """Whether a generation that began and last moved then has to end now."""
        now = time.monotonic()
        if self._deadline_s and now - began > self._deadline_s:
            return True
        return self.is_stall(now - last_progress)

    def is_stall(self, gap_s: float) -> bool:
        """Whether a pause of that length was too long."""
        return bool(self._stall_s) and gap_s > self._stall_s
