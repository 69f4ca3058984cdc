"""
Warm equals cold, proved on the user's machine at load (docs/reuse.md s8).

Each way in which the store hands out KV, the batch, and steps that are described ahead
are run against a computation of the same ids without them (engine/selftest/runs). What
has not passed is not used; what does not fit into the time of a load is proved between
the first requests.
"""

import logging
import math
import random
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sidecar.engine.gpu_scheduler import Errand
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import run_to_end
from sidecar.engine.selftest.array_distance import Difference
from sidecar.engine.selftest.runs import Runs
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.kv_layers import give_back_much

logger = logging.getLogger(__name__)

LOAD_S = 20.0  # what of a load the self-test may take
_PATIENCE_S = 10.0  # how long running requests may put off the next test
_QUIET_S = 0.5  # after a load: who waited for it comes before the tests


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
        self._all = Runs(model).paths()
        self._left = list(self._all)
        self.results: list[PathResult] = []

    @property
    def pending(self) -> list[str]:
        """Names of the ways that have not been tried."""
        return [name for name, _ in self._left]

    def skip(self, name: str) -> None:
        """Do not try a way."""
        self._left = [(other, run) for other, run in self._left if other != name]

    def restore(self, name: str) -> None:
        """Try a way after all, behind those that are left."""
        self._left += [path for path in self._all if path[0] == name]

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
        give_back_much()
        logger.log(
            logging.INFO if outcome == "ok" else logging.WARNING,
            "tested reuse path=%s outcome=%s %s",
            name,
            outcome,
            difference,
        )
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
        last: what is to be done between requests besides, when all is proved.
        begins_at: when the first test may begin (time.monotonic).
    """

    def __init__(
        self,
        test: SelfTest,
        tell: Callable[[PathResult], None],
        is_idle: Callable[[], bool],
        last: Generator[None, None, None] | None = None,
        begins_at: float = 0.0,
    ) -> None:
        self._begins_at = begins_at
        self._test = test
        self._tell = tell
        self._is_idle = is_idle
        self._rest = last
        self._running: Generator[None, None, PathResult] | None = None
        self._last = time.monotonic()

    def has_work(self) -> bool:
        """Whether something is left and nobody waits, or has been let go first."""
        if time.monotonic() < self._begins_at:
            return False
        if not self._test.pending and self._running is None:
            return self._rest is not None and self._is_idle()
        return self._is_idle() or time.monotonic() - self._last > _PATIENCE_S

    def interrupt(self, *, beside_streams: bool) -> bool:
        """The next computation of the next test."""
        if self._running is None and not self._test.pending:
            return self._advance_rest()
        if self._running is None:
            self._running = self._test.advance()
        try:
            next(self._running)
        except StopIteration as end:
            self._running = None
            self._last = time.monotonic()
            self._tell(end.value)
        return True

    def _advance_rest(self) -> bool:
        if self._rest is None:
            return False
        try:
            next(self._rest)
        except StopIteration:
            self._rest = None
        return True

    def run_for(self, seconds: float) -> Generator[None, None, None]:
        """Do the tests that can be begun in that time."""
        started = time.monotonic()
        while self._test.pending and time.monotonic() - started < seconds:
            self._tell((yield from self._test.advance()))


def _ignore(passed: Sequence[str]) -> None:
    """Nobody remembers it."""


@dataclass(frozen=True, slots=True)
class ProofPlan:
    """
    When a model's tests are done, and what is known of them.

    Args:
        load_s: the tests begun within that time are waited for; the others run
            between requests.
        outcomes: how they went when this process had the same model before.
        remembered: those that have passed on this machine; one of them is done again.
        last: what is to be done between requests when all is proved.
        note: takes the ways that have passed, whenever one more is known.
    """

    load_s: float
    outcomes: Mapping[str, str] = field(default_factory=dict)
    remembered: Sequence[str] = ()
    last: Generator[None, None, None] | None = None
    note: Callable[[Sequence[str]], None] = _ignore

    def outcome(self, name: str) -> str | None:
        """How a test went before; None: that is not known."""
        if self.outcomes.get(name) in ("ok", "failed"):
            return self.outcomes[name]
        return "ok" if name in self.remembered else None

    def sample(self) -> str | None:
        """The one of the remembered tests that is done again."""
        names = [name for name in self.remembered if name not in self.outcomes]
        return random.choice(names) if names else None


def prove(
    engine: TextEngine, test: SelfTest, plan: ProofPlan
) -> Generator[None, None, None]:
    """Use each way of reuse from when its test has passed on; in turns of the GPU."""

    def take(result: PathResult) -> None:
        engine.selftest[result.name] = result.outcome
        engine.allow(result.name, is_allowed=result.outcome == "ok")
        if result.outcome != "ok" and result.name in plan.remembered:
            logger.warning("what was remembered of this model is proved anew")
            _distrust(engine, test, plan.remembered)
        passed = [name for name, outcome in engine.selftest.items() if outcome == "ok"]
        plan.note([name for name in passed if name != "splitter"])

    sample = plan.sample()
    for name in test.pending:
        outcome = plan.outcome(name)
        engine.allow(name, is_allowed=outcome == "ok")
        engine.selftest[name] = outcome or "pending"
        if outcome and name != sample:
            test.skip(name)
    quiet_s = 0.0 if plan.load_s else _QUIET_S
    begins_at = time.monotonic() + quiet_s
    proof = Proof(test, take, lambda: engine.is_idle, plan.last, begins_at)
    yield from proof.run_for(plan.load_s)
    if test.pending:
        unused = [name for name in test.pending if name != sample]
        logger.info(
            "selftest goes on between requests: %s; not used until then: %s",
            ", ".join(test.pending),
            ", ".join(unused) or "none",
        )
    engine.work_between(proof, begins_in_s=quiet_s)


def _distrust(engine: TextEngine, test: SelfTest, names: Sequence[str]) -> None:
    """Prove ways anew before they are used again."""
    for name in names:
        if engine.selftest.get(name) == "ok":
            engine.allow(name, is_allowed=False)
            engine.selftest[name] = "pending"
            test.restore(name)
