"""
Decides each turn of the GPU: a decode step or other work, and which model's.

A decode turn moves every stream of one model on by a token. All else interrupts the
streams: a prefill chunk, a batch of texts, a step of a load. Models share both sorts of
turn by the time these take, not by their number: steps of 5 and of 40 ms make 100 and
12.5 a second, not 22 each. And what was interrupted gets its share of the time before
the next interruption, whoever's that is: so two models that prefill stall the stream of
a third no longer than one of them does.
"""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

# Of an interruption's time, to running streams before the next: counted in steps as
# fast as they are without one, it leaves them 0.45 / (1 + 0.45 x slowdown) of their
# rate.
_DECODE_SHARE = 0.45
_BACKGROUND_EVERY_S = 2.0  # however much there is to do


class Worker(Protocol):
    """A model's share of the GPU thread, or another errand there. Must not raise."""

    @property
    def is_background(self) -> bool:
        """Whether what waits for it can wait for all others."""

    @property
    def is_for_idle(self) -> bool:
        """Whether it takes its turns only while nobody else has work."""

    def has_work(self) -> bool:
        """Whether a turn would do something."""

    def has_streams(self) -> bool:
        """Whether rows decode, which every other turn delays."""

    def decode(self, *, is_free: bool) -> float:
        """
        Move all streams on by a token.

        Args:
            is_free: whether no interruption waits for the streams' share.
        Returns:
            The seconds to count: fewer where it was slow for other reasons.
        """

    def hand_over(self) -> None:
        """Let readers have what the last decode turn held for the next one."""

    def interrupt(self, *, beside_streams: bool) -> bool:
        """
        Do one unit of other work, a short one beside streams; of any model.

        Returns:
            Whether there was something to do.
        """


class Errand:
    """What a worker without streams has in common with the others."""

    is_background = True
    is_for_idle = False

    def has_streams(self) -> bool:
        """Never."""
        return False

    def decode(self, *, is_free: bool) -> float:
        """There are none to move on."""
        return 0.0

    def hand_over(self) -> None:
        """It has no readers."""


class GpuScheduler:
    """
    Gives the workers their turns. One thread, but for `add` and `remove`: the same.

    Args:
        clock: seconds. For tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._workers: list[Worker] = []
        self._decoding = _Shares()
        self._interrupting = _Shares()
        self._owed_s = 0.0
        self._background_at = clock()

    def add(self, worker: Worker) -> None:
        """Give a worker its turns from now on."""
        self._workers.append(worker)

    def remove(self, worker: Worker) -> None:
        """Give it none any more, and let go of it."""
        self._workers.remove(worker)
        self._decoding.drop(worker)
        self._interrupting.drop(worker)

    def has_work(self) -> bool:
        """Whether anyone would use a turn."""
        return any(worker.has_work() for worker in self._workers)

    def hand_over(self) -> None:
        """Let all readers have what is held for them."""
        for worker in self._workers:
            worker.hand_over()

    def take(self) -> None:
        """One turn of whoever is due."""
        busy = _without_idlers([one for one in self._workers if one.has_work()])
        streaming = [worker for worker in busy if worker.has_streams()]
        is_free = self._owed_s <= 0.0
        may_interrupt = is_free or not streaming
        if may_interrupt and self._interrupt(busy, beside_streams=bool(streaming)):
            return
        if streaming:
            worker = self._decoding.order(streaming)[0]
            started = self._clock()
            counted_s = worker.decode(is_free=is_free)
            self._decoding.used(worker, self._clock() - started)
            self._owed_s -= counted_s
            if len(busy) > 1:  # the next turn may be another's
                worker.hand_over()

    def _interrupt(self, busy: list[Worker], *, beside_streams: bool) -> bool:
        """Have the first who can do something; whether there was one."""
        for worker in self._in_turn(busy):
            started = self._clock()
            if worker.interrupt(beside_streams=beside_streams):
                seconds = self._clock() - started
                self._interrupting.used(worker, seconds)
                self._owed_s = seconds * _DECODE_SHARE
                if worker.is_background:
                    self._background_at = self._clock()
                return True
        return False

    def _in_turn(self, busy: list[Worker]) -> Iterable[Worker]:
        last = [worker for worker in busy if worker.is_background]
        first = self._interrupting.order([w for w in busy if not w.is_background])
        if self._clock() - self._background_at > _BACKGROUND_EVERY_S:
            return [*last, *first]
        return [*first, *last]


def _without_idlers(busy: list[Worker]) -> list[Worker]:
    """Those that may take a turn: what is for idle times waits for all others."""
    others = [worker for worker in busy if not worker.is_for_idle]
    return others or busy


class _Shares:
    """Time used by each: who has used the least is next (start-time fair queueing)."""

    def __init__(self) -> None:
        self._used_s: dict[Worker, float] = {}
        self._last: list[Worker] = []

    def order(self, present: list[Worker]) -> list[Worker]:
        """Who has used the least first; one that joins begins at the others' least."""
        stayed = [self._used_s[w] for w in present if w in self._last]
        floor_s = min(stayed, default=max(self._used_s.values(), default=0.0))
        for worker in present:
            if worker not in self._last:
                used_s = self._used_s.get(worker, 0.0)
                self._used_s[worker] = max(used_s, floor_s)
        self._last = present
        return sorted(present, key=lambda worker: self._used_s[worker])

    def used(self, worker: Worker, seconds: float) -> None:
        """Count a turn."""
        self._used_s[worker] = self._used_s.get(worker, 0.0) + seconds

    def drop(self, worker: Worker) -> None:
        """Let go of one."""
        self._used_s.pop(worker, None)
        self._last = [other for other in self._last if other is not worker]
