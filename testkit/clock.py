"""A clock that a test moves, for code whose outcome depends on the time that passes."""

import math
import time
from types import SimpleNamespace

import pytest


class Clock:
    """
    Time that stands still but for `advance`.

    Args:
        modules: names of the modules that see it in place of `time`.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *modules: str) -> None:
        self._now = float(
            math.ceil(time.monotonic())
        )  # sums of whole seconds are exact
        fake = SimpleNamespace(
            monotonic=self.now, perf_counter=self.now, time=time.time,
            sleep=lambda _seconds: None,
        )  # fmt: skip
        for module in modules:
            patch.setattr(f"{module}.time", fake)

    def now(self) -> float:
        """Seconds since some moment in the past."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
