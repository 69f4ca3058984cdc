"""
Batches of texts, each as long as running streams may be stalled.

Texts go together by their lengths, so that little is padded. What a token takes is
measured as they run.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Ids = Sequence[int]
# Computes a batch, given the places of its texts: a result for each of them.
RunBatch = Callable[[list[int]], Sequence[T]]

_MIN_BATCH, _FIRST_BATCH, _MAX_BATCH = 256, 2048, 16384  # tokens, padding included
_SMOOTHING = 0.5


class PacedBatches:
    """
    What has texts computed on the GPU thread, batch by batch.

    Args:
        stall_s: how long a batch may take. max_rows: most texts of one; None: any.
        rate_s: seconds of a token, padding included; None: not known yet.
    """

    def __init__(
        self, stall_s: float, max_rows: int | None = None, rate_s: float | None = None
    ) -> None:
        self._stall_s = stall_s
        self._max_rows = max_rows
        self._rate_s = rate_s

    def steps(
        self, texts: Sequence[Ids], check: Callable[[], None], run: RunBatch[T]
    ) -> Generator[None, None, list[T]]:
        """
        A result for each text, in their order; others go on at each yield.

        Args:
            check: raises if nobody waits any more; called between batches.
        """
        found: dict[int, T] = {}
        waiting = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        while waiting:
            check()
            batch = self._next(waiting, texts)
            started = time.perf_counter()
            results = run(batch)
            size = len(batch) * len(texts[batch[-1]])
            self._learn((time.perf_counter() - started) / size)
            found |= dict(zip(batch, results, strict=True))
            yield
        return [found[index] for index in range(len(texts))]

    def _next(self, waiting: list[int], texts: Sequence[Ids]) -> list[int]:
        """Take the shortest that are left, as many as one turn may take."""
        room, count = self._max_tokens(), 1
        most = min(self._max_rows or len(waiting), len(waiting))
        while count < most and (count + 1) * len(texts[waiting[count]]) <= room:
            count += 1
        batch = waiting[:count]
        del waiting[:count]
        return batch

    def _max_tokens(self) -> int:
        if self._rate_s is None:
            return _FIRST_BATCH
        return int(min(_MAX_BATCH, max(_MIN_BATCH, self._stall_s / self._rate_s)))

    def _learn(self, rate_s: float) -> None:
        known = rate_s if self._rate_s is None else self._rate_s
        self._rate_s = known + _SMOOTHING * (rate_s - known)
