"""How long a prefill's chunk may be while others decode, and when one has to end."""

import statistics
import time
from collections.abc import Callable


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


_MIN_CHUNK = 64
_ALONE = 2  # times as long a chunk where no stream waits: small ones cost throughput
_MAX_SLOWDOWN = 1.6  # of a step between two chunks; the rest has other reasons
_SMOOTHING = 0.5
_FREE_SMOOTHING = 1 / 32  # what is forecast is a mean: one slow step must not move it
_NUM_RECENT, _NUM_USUAL = 3, 64  # chunks
_OLD_S = 30.0


class PrefillRate:
    """
    Seconds of a prefilled token, for forecasts.

    The median of the last few chunks: one that stalled says nothing of the next prompt.
    Where all of them were slow, and prompts are therefore refused, nothing is measured
    any more that could tell otherwise: after a while what was usual counts again.

    Thread-safe: written by the GPU thread, read by all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual: tuple[float, ...] = ()
        self._measured_at = 0.0

    def measured(self, rate_s: float) -> None:
        """Learn from a chunk."""
        self._usual = (*self._usual, rate_s)[-_NUM_USUAL:]
        self._measured_at = self._clock()

    @property
    def seconds(self) -> float:
        """What a token is expected to take; 0 before the first measure."""
        usual = self._usual
        if not usual:
            return 0.0
        recent = statistics.median(usual[-_NUM_RECENT:])
        if self._clock() - self._measured_at < _OLD_S:
            return recent
        return min(recent, statistics.median(usual))


class PrefillPacer:
    """
    Sizes prefill chunks so that nobody waits longer for the GPU than a target.

    A chunk cannot be broken off: it is cut to what the last measured rate does in
    `stall_s` beside running streams, and alone, where a newcomer or a cancelled prompt
    waits for its end, in twice that. Between two chunks the streams decode for a share
    of the last chunk's time (gpu_scheduler). Steps between chunks are slower than other
    ones (caches are cold, the next is not yet begun), which is not the streams' loss:
    what counts is how many they get.

    Args:
        step_size: most tokens of a chunk.
        stall_s: longest pause of a running stream, in seconds.
        rate_s: seconds of a prefilled token, measured at the load.
    """

    def __init__(
        self, step_size: int, stall_s: float, rate_s: float | None = None
    ) -> None:
        self._step_size = step_size
        self._stall_s = stall_s
        self.rate = PrefillRate()
        self._seconds_per_token = rate_s
        if rate_s is not None:
            self.rate.measured(rate_s)
        self._decode_step_s = 0.0
        self._free_step_s = 0.0  # of steps while no prefill waits; 0: none yet

    @property
    def decode_step_s(self) -> float:
        """Seconds of a decode step, as measured last."""
        return self._decode_step_s

    def chunk_len(self, *, beside_streams: bool) -> int:
        """Tokens of the next chunk."""
        if self._seconds_per_token is None:
            return min(_MIN_CHUNK, self._step_size)
        max_s = self._stall_s if beside_streams else _ALONE * self._stall_s
        fitting = int(max_s / self._seconds_per_token)
        fitting -= fitting % _MIN_CHUNK  # few lengths: kernels are tuned for each
        return max(min(fitting, self._step_size), min(_MIN_CHUNK, self._step_size))

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk just done; the rate follows the depth."""
        last = self._seconds_per_token
        if last is not None and num_tokens < min(_MIN_CHUNK, self._step_size):
            return  # a short rest: mostly what any chunk costs
        rate = seconds / max(1, num_tokens)
        self.rate.measured(rate)
        # Rising with the depth, it is believed at once: a late guess is a long pause.
        if last is None or rate > last:
            self._seconds_per_token = rate
        else:
            self._seconds_per_token = _smoothed(last, rate)

    def decoded(self, seconds: float, *, is_free: bool) -> float:
        """
        Learn from a decode step.

        Args:
            is_free: whether it came although others might have interrupted: none waits.
        Returns:
            The seconds that count as the streams' share.
        """
        self._decode_step_s = _smoothed(self._decode_step_s, seconds)
        if is_free:
            self._free_step_s = _smoothed(self._free_step_s, seconds, _FREE_SMOOTHING)
        as_free = min(seconds, self._free_step_s or seconds)
        return max(as_free, seconds / _MAX_SLOWDOWN)


def _smoothed(last: float, now: float, share: float = _SMOOTHING) -> float:
    """That share of what is, the rest of what was; the first time, what is."""
    return share * now + (1 - share) * (last or now)
