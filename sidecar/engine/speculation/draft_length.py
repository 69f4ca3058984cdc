"""
How many tokens are drafted: what a longer call costs, and how many are taken.

A call of k drafted tokens costs c(k) plain steps; both are measured as they run, for
the price is the device's own (a CUDA card's 8 rows cost 1.8 steps in bf16 and 5.7 in
4 bits). If each drafted token is taken with probability p when those before it were,
a call brings 1 + p + .. + p^k tokens. The length with the best ratio is chosen; where
none gains, nothing is drafted. What other requests made dear, or a busy moment, must
not keep drafts off for good: after a while one short call is measured anew, and what is
known of the longer ones changes with it.
"""

import math

LENGTHS = (2, 4, 8, 16)
_LEAST_GAIN = 1.05
_KEPT = 0.8  # share of what was known that is kept beside what is measured
_FIRST_PRICE = 0.06  # for each drafted token, until it is measured
_BELIEVED = 0.7  # p before anything was drafted
_STALE_STEPS = 512  # then the shortest is tried once, whatever it took
_MISSES, _REST = 32, 64  # tokens: after so many in vain, nothing for so many


class DraftPrices:
    """What a call of each length costs, in seconds; of one model. GPU thread only."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._call_s: dict[int, float] = {}
        self._begun: set[int] = set()
        self._num_steps = 0  # plain ones since the last call

    def stepped(self, seconds: float) -> None:
        """A plain step of one row took so long."""
        self._num_steps += 1
        self._step_s = _smoothed(self._step_s, seconds)

    def called(self, length: int, seconds: float) -> None:
        """A call of so many drafted tokens took so long."""
        bucket = _bucket(length)
        is_stale, self._num_steps = self.are_stale, 0
        if bucket not in self._begun:  # kernels are compiled at the first one
            self._begun.add(bucket)
            return
        if is_stale and (known := self._call_s.get(bucket)):
            self._call_s = {n: s * seconds / known for n, s in self._call_s.items()}
        self._call_s[bucket] = _smoothed(self._call_s.get(bucket, 0.0), seconds)

    @property
    def are_stale(self) -> bool:
        """Whether no call was tried for long: what was dear may be cheap by now."""
        return self._num_steps >= _STALE_STEPS

    def of(self, length: int) -> float:
        """In plain steps."""
        seconds = self._call_s.get(_bucket(length))
        if seconds is None or not self._step_s:
            return 1.0 + _FIRST_PRICE * length
        return seconds / self._step_s


def _bucket(length: int) -> int:
    return next((each for each in LENGTHS if length <= each), LENGTHS[-1])


def _smoothed(known: float, measured: float) -> float:
    """One outlier (a compiled kernel, a busy host) must not decide for long."""
    if not known:
        return measured
    return _KEPT * known + (1 - _KEPT) * min(measured, 4 * known)


class DraftLength:
    """Chooses the length for one answer. GPU thread only."""

    def __init__(self, prices: DraftPrices) -> None:
        self._prices = prices
        self._taken = _BELIEVED
        self._in_vain = self._resting = 0

    def choose(self) -> int:
        """How many tokens to draft; 0: none."""
        if self._resting:
            self._resting -= 1
            return 0
        gains = {length: self._gain(length) for length in LENGTHS}
        best = max(gains, key=lambda length: gains[length])
        if gains[best] >= _LEAST_GAIN:
            return best
        return LENGTHS[0] if self._prices.are_stale else 0

    def note(self, num_drafted: int, num_taken: int) -> None:
        """A call had so many drafted tokens, of which so many were taken."""
        tried = num_taken + (num_taken < num_drafted)
        for place in range(tried):
            share = 1.0 if place < num_taken else 0.0
            self._taken += (share - self._taken) / 12
        self._in_vain = 0 if num_taken else self._in_vain + num_drafted
        if self._in_vain >= _MISSES:
            self._in_vain, self._resting, self._taken = 0, _REST, _BELIEVED

    def _gain(self, length: int) -> float:
        share = min(self._taken, 0.999)
        brought = (1 - math.pow(share, length + 1)) / (1 - share)
        return brought / self._prices.of(length)
