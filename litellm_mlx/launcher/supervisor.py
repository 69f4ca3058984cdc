"""
Restarts child processes that end, hang or say that they are stuck.

A service is *starting* until its health URL answers well, then *up*. One that ends,
says it is sick, or says nothing for minutes, is started again after a pause that
doubles with every start in a row that never came up; after the fifth such start all is
given up:

    starting --healthy--> up --ended or sick--> pausing --> starting
    starting --ended or too late--> pausing, or (fifth in a row) ServiceFailed

The first start is not tried again. While a starting service says that it is fetching
what it needs, the clock of its deadline stands still.
"""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from litellm_mlx.identity import challenge
from litellm_mlx.launcher.child import Child, Service

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 2.0


class ServiceFailed(Exception):
    """
    A service did not come up.

    `tail` holds its last lines of output, None if the message is its own reason.
    """

    def __init__(self, message: str, tail: str | None) -> None:
        super().__init__(message)
        self.tail = tail


class StopRequested(Exception):
    """A signal arrived while a service was being started."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses between restarts and when to give up."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 15.0
    max_failed_starts: int = 5
    health_every_s: float = 5.0
    sick_after: int = 3  # times in a row that it says so
    silent_after: int = 40  # times in a row that it says nothing: four minutes or more

    def pause_s(self, num_failed: int) -> float:
        """Pause before the next start, after so many failed ones in a row."""
        return min(self.first_pause_s * 2.0**num_failed, self.longest_pause_s)


class Watched:
    """
    A service under supervision: its child, and how its starts went.

    Args:
        answer: the last one of its health URL while it starts; None: it gave none.
    """

    def __init__(self, child: Child) -> None:
        self.child = child
        self.answer: httpx.Response | None = None
        self.is_up = False
        self.num_failed = 0
        self.num_sick = 0
        self.num_silent = 0
        self.restart_at: float | None = None
        self.next_check = 0.0


class Supervisor:
    """
    Starts services, keeps them running, and stops them together.

    All methods but `request_stop` belong to one thread. Use as a context manager:
    leaving it stops every service.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        stop_wait_s: float,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._clock = clock
        self._stop_wait_s = stop_wait_s
        self._policy = policy or RestartPolicy()
        self._watched: list[Watched] = []
        self._num_stop_requests = 0
        self._stopping = threading.Event()
        # The services are on this machine: never by way of a configured proxy.
        self._client = httpx.Client(trust_env=False, timeout=_PROBE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        self._client.close()

    @property
    def was_killed(self) -> bool:
        """True if a second signal cut the stopping short."""
        return self._num_stop_requests > 1

    def request_stop(self, signum: int = 0, frame: object = None) -> None:
        """Ask for the end: once to stop, twice to kill. Fits as a signal handler."""
        self._num_stop_requests += 1
        self._stopping.set()

    def start(self, service: Service) -> None:
        """
        Start a service and wait until it is healthy.

        Raises:
            ServiceFailed: it ended, or was not healthy by its deadline.
            StopRequested: a stop was asked for meanwhile.
        """
        watched = self.begin(service)
        self.wait(lambda: watched.is_up)

    def begin(self, service: Service) -> Watched:
        """Start a service; `wait` is to be called until it is up."""
        watched = Watched(Child(service, self._say, self._clock))
        self._watched.append(watched)
        return watched

    def wait(self, is_so: Callable[[], bool]) -> None:
        """
        Wait for something that services say as they start.

        Raises:
            ServiceFailed: one ended, or was not healthy by its deadline.
            StopRequested: a stop was asked for meanwhile.
        """
        while True:
            for watched in self._watched:
                if not watched.is_up:
                    self._check_start(watched)
                else:
                    _check_runs(watched.child)
            if is_so():
                return
            if self._stopping.wait(_POLL_S):
                raise StopRequested

    def watch(self) -> None:
        """
        Keep the started services running until a stop is asked for.

        Raises:
            ServiceFailed: one was restarted in vain too many times.
        """
        while not self._stopping.wait(_POLL_S):
            for watched in self._watched:
                self._step(watched)

    def shutdown(self) -> None:
        """Stop all services together: TERM, a while to drain, then KILL."""
        children = [watched.child for watched in self._watched]
        for child in children:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + self._stop_wait_s
        while time.monotonic() < deadline and not self.was_killed:
            if all(child.exit_code() is not None for child in children):
                break
            time.sleep(_POLL_S)
        for child in children:
            child.kill()
        self._watched.clear()

    def _step(self, watched: Watched) -> None:
        if watched.restart_at is not None:
            if time.monotonic() >= watched.restart_at:
                watched.restart_at = None
                service = watched.child.service
                watched.child = Child(service, self._say, self._clock)
        elif watched.is_up:
            self._check_running(watched)
        else:
            self._check_restart(watched)

    def _check_start(self, watched: Watched) -> bool:
        """Look once at a starting service; raises ServiceFailed if it cannot come."""
        child, service = watched.child, watched.child.service
        _check_runs(child)
        answer = watched.answer = self._probe(service)
        if answer is not None and service.is_fetching(answer):
            child.defer_deadline()
            return False
        if child.is_late():
            child.kill()
            limit = f"{service.start_deadline_s:g} s"
            message = f"{service.name} was not ready within {limit}"
            raise ServiceFailed(message, child.tail())
        if answer is None or not service.is_healthy(answer):
            return False
        if child.age_s() < service.min_wait_s:
            return False
        watched.is_up, watched.num_failed = True, 0
        watched.num_sick = watched.num_silent = 0
        return True

    def _check_restart(self, watched: Watched) -> None:
        try:
            if self._check_start(watched):
                self._say(f"{watched.child.service.name} is up again")
        except ServiceFailed as failure:
            watched.num_failed += 1
            if watched.num_failed >= self._policy.max_failed_starts:
                message = f"{failure}, {watched.num_failed} starts in a row"
                raise ServiceFailed(message, failure.tail) from None
            self._pause(watched, str(failure))

    def _check_running(self, watched: Watched) -> None:
        child = watched.child
        if child.exit_code() is not None:
            child.wait(0)
            self._pause(watched, child.ending())
            return
        is_stuck = child.service.is_stuck
        if is_stuck is not None and time.monotonic() >= watched.next_check:
            watched.next_check = time.monotonic() + self._policy.health_every_s
            answer = self._probe(child.service)
            fault = self._fault(watched, answer, is_stuck)
            if fault is not None:
                child.kill()
                self._pause(watched, f"{child.service.name} {fault}")

    def _fault(
        self,
        watched: Watched,
        answer: httpx.Response | None,
        is_stuck: Callable[[httpx.Response], bool],
    ) -> str | None:
        """
        What is wrong with a service that has just been asked; None: nothing.

        Only its own word counts: a busy service answers late, or turns us away. But one
        that has hung, interpreter and all, says nothing for ever.
        """
        is_sick = answer is not None and is_stuck(answer)
        watched.num_sick = watched.num_sick + 1 if is_sick else 0
        watched.num_silent = watched.num_silent + 1 if answer is None else 0
        if watched.num_sick >= self._policy.sick_after:
            return "said it is stuck"
        if watched.num_silent >= self._policy.silent_after:
            return "does not answer any more"
        return None

    def _pause(self, watched: Watched, reason: str) -> None:
        pause_s = self._policy.pause_s(watched.num_failed)
        self._say(f"{reason}; starting it again in {pause_s:g} s")
        watched.is_up = False
        watched.restart_at = time.monotonic() + pause_s

    def _probe(self, service: Service) -> httpx.Response | None:
        try:
            return self._client.get(service.health_url, headers=challenge())
        except httpx.HTTPError:
            return None


def _check_runs(child: Child) -> None:
    """Raise ServiceFailed if it has ended: with its own reason, else its last lines."""
    if child.exit_code() is None:
        return
    child.wait(0)
    if fault := child.fault():
        raise ServiceFailed(fault, None)
    raise ServiceFailed(child.ending(), child.tail())
