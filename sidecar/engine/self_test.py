"""
Warm equals cold, proved on the user's machine at load (docs/reuse.md s8).

Each way in which the store hands out KV, and the batch, is run against a computation
of the same ids that uses neither (engine/self_test_runs). What has not passed is not
used; what does not fit into the time of a load is proved between the first requests.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import mlx.core as mx

from sidecar.engine.array_distance import Difference
from sidecar.engine.loader import LoadedModel, run_to_end
from sidecar.engine.self_test_runs import Runs
from sidecar.engine.text import TextEngine
from sidecar.engine.turns import Errand

logger = logging.getLogger(__name__)

LOAD_S = 20.0  # what of a load the self-test may take
_PATIENCE_S = 10.0  # how long running requests may put off the next test


@dataclass(frozen=True, slots=True)
class PathResult:
    """
    One way of reuse and how its test went.

    Args:
        difference: what it changed; infinite if the test itself broke.
    """

    name: str
    outcome: Literal["ok", "failed"]
    difference: Difference


class SelfTest:
    """The tests of one model, done one by one; GPU thread only."""

    def __init__(self, model: LoadedModel) -> None:
        self._left = Runs(model).paths()
        self.results: list[PathResult] = []

    @property
    def pending(self) -> list[str]:
        """Names of the ways that have not been tried."""
        return [name for name, _ in self._left]

    def skip(self, name: str) -> None:
        """Do not try a way."""
        self._left = [(other, run) for other, run in self._left if other != name]

    def advance(self) -> Generator[None, None, PathResult]:
        """Run the next test; it yields after each of its computations."""
        name, run = self._left.pop(0)
        try:
            difference = yield from run()
        except Exception as error:
            logger.exception("selftest path failed name=%s", name)
            # Whoever keeps the error must not keep the arrays of its frames.
            traceback.clear_frames(error.__traceback__)
            difference = Difference(math.inf, math.inf, 0.0)
        outcome: Literal["ok", "failed"] = "ok" if difference.is_allowed else "failed"
        result = PathResult(name, outcome, difference)
        self.results.append(result)
        mx.clear_cache()
        logger.log(
            logging.INFO if outcome == "ok" else logging.WARNING,
            "tested reuse path=%s outcome=%s %s", name, outcome, difference,
        )  # fmt: skip
        return result


def run_selftest(model: LoadedModel) -> list[PathResult]:
    """Try every way, however long it takes; GPU thread only."""
    test = SelfTest(model)
    while test.pending:
        run_to_end(test.advance())
    return test.results


class Proof(Errand):
    """
    A GPU-thread worker that proves what was left at the load, then has no more work.

    Args:
        tell: takes each result. is_idle: whether no request runs.
    """

    def __init__(
        self,
        test: SelfTest,
        tell: Callable[[PathResult], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self._test = test
        self._tell = tell
        self._is_idle = is_idle
        self._running: Generator[None, None, PathResult] | None = None
        self._last = time.monotonic()

    def has_work(self) -> bool:
        """Whether something is left and nobody waits, or has been let go first."""
        if not self._test.pending and self._running is None:
            return False
        return self._is_idle() or time.monotonic() - self._last > _PATIENCE_S

    def interrupt(self, *, beside_streams: bool) -> bool:
        """The next computation of the next test."""
        if self._running is None:
            self._running = self._test.advance()
        try:
            next(self._running)
        except StopIteration as end:
            self._running = None
            self._last = time.monotonic()
            self._tell(end.value)
        return True

    def run_for(self, seconds: float) -> Generator[None, None, None]:
        """Do the tests that can be begun in that time."""
        started = time.monotonic()
        while self._test.pending and time.monotonic() - started < seconds:
            self._tell((yield from self._test.advance()))


def prove(
    engine: TextEngine,
    test: SelfTest,
    load_s: float,
    known: Mapping[str, str] = MappingProxyType({}),
) -> Generator[None, None, None]:
    """
    Use each way of reuse from when its test has passed on; in turns on the GPU thread.

    Args:
        load_s: the tests begun within that time are waited for; the others run
            between requests.
        known: how they went when this process had the same model before.
    """

    def take(result: PathResult) -> None:
        engine.selftest[result.name] = result.outcome
        engine.allow(result.name, is_allowed=result.outcome == "ok")

    for name in test.pending:
        settled = known.get(name) if known.get(name) in ("ok", "failed") else None
        engine.allow(name, is_allowed=settled == "ok")
        engine.selftest[name] = settled or "pending"
        if settled:
            test.skip(name)
    proof = Proof(test, take, lambda: engine.is_idle)
    yield from proof.run_for(load_s)
    if test.pending:
        logger.warning(
            "selftest goes on between requests, these are not used until then: %s",
            ", ".join(test.pending),
        )
    engine.work_between(proof)
