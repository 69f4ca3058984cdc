"""How far a download is: for /health, and as a line for people now and then."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sidecar.core.format_bytes import format_bytes

_TELL_EVERY_S = 15.0  # lines in a log, not a bar
_SPEED_OVER_S = 30.0


@dataclass(frozen=True, slots=True)
class DownloadState:
    """A download that is running."""

    name: str
    done_bytes: int
    total_bytes: int


class DownloadProgress:
    """
    Counts the bytes of one download after the other. Safe from any thread.

    Args:
        tell: takes a line for the person who waits. clock: seconds.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._state: DownloadState | None = None
        self._began = self._logged_at = 0.0
        self._fetched = 0
        self._arrived = 0
        self._samples: deque[tuple[float, int]] = deque()

    @property
    def arrived_bytes(self) -> int:
        """Bytes of all downloads so far; those that were fetched again count again."""
        with self._lock:
            return self._arrived

    @property
    def state(self) -> DownloadState | None:
        """The running download, None between them."""
        with self._lock:
            return self._state

    def begin(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """A download starts; `done_bytes` are there from earlier tries."""
        with self._lock:
            self._state = DownloadState(name, done_bytes, total_bytes)
            self._began = self._logged_at = self._clock()
            self._fetched = 0
            self._samples = deque([(self._began, 0)])
        kept = f"; {format_bytes(done_bytes)} are here already" if done_bytes else ""
        self._tell(f"downloading {name}: {format_bytes(total_bytes)}{kept}")

    def add(self, num_bytes: int) -> None:
        """Bytes arrived; fewer than none if some have to be fetched again."""
        with self._lock:
            state = self._state
            if state is not None:
                done = state.done_bytes + num_bytes
                self._state = DownloadState(state.name, done, state.total_bytes)
                self._fetched += num_bytes
                self._arrived += max(num_bytes, 0)

    def tell_when_due(self) -> None:
        """Say how far it is, a few times a minute however often this is called."""
        with self._lock:
            now = self._clock()
            if self._state is None or now - self._logged_at < _TELL_EVERY_S:
                return
            self._logged_at = now
            line = _line(self._state, self._speed(now))
        self._tell(line)

    def say(self, text: str) -> None:
        """Something else worth knowing."""
        self._tell(text)

    def end(self) -> None:
        """All of it is there."""
        with self._lock:
            state, self._state = self._state, None
            if state is None:
                return
            line = (
                f"downloaded {state.name}: {format_bytes(self._fetched)} in "
                f"{format_seconds(self._clock() - self._began)}"
            )
        self._tell(line)

    def stop(self) -> None:
        """It broke off."""
        with self._lock:
            self._state = None

    def _speed(self, now: float) -> float:
        """Bytes a second over the last while; forgets the samples before it."""
        self._samples.append((now, self._fetched))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _SPEED_OVER_S:
            self._samples.popleft()
        since, then = self._samples[0]
        return (self._fetched - then) / max(now - since, 0.001)


def _line(state: DownloadState, speed: float) -> str:
    share = 100 * state.done_bytes // max(state.total_bytes, 1)
    text = (
        f"downloading {state.name}: {format_bytes(state.done_bytes)} of "
        f"{format_bytes(state.total_bytes)} ({share} %)"
    )
    if speed <= 0:
        return f"{text}, nothing arrives"
    left_s = (state.total_bytes - state.done_bytes) / speed
    return f"{text}, {format_bytes(speed)}/s, {format_seconds(left_s)} left"


def format_seconds(seconds: float) -> str:
    """`5 min 20 s`: no finer than is of use."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
