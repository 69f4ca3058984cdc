"""One child process: started in a session of its own, its output read and kept."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import httpx

from litellm_mlx.launcher.terminal_lines import prefixed

_TAIL_LINES = 40
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_CONTROL = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Service:
    """What to run and how to see that it is well."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    health_url: str
    is_healthy: Callable[[httpx.Response], bool]
    start_deadline_s: float
    min_wait_s: float = 0.0  # it is not called up before this
    # It is started again when it keeps saying so, or says nothing for minutes; None:
    # its health is not watched.
    is_stuck: Callable[[httpx.Response], bool] | None = None
    # What it does now takes as long as it takes: no part of its start's deadline.
    is_fetching: Callable[[httpx.Response], bool] = lambda answer: False
    fault_prefix: str | None = None  # of the line that says why it cannot start
    on_pid: Callable[[int | None], None] = lambda pid: None
    shown: Callable[[Iterable[str]], Iterable[str]] | None = None  # None: all, prefixed
    keep: Callable[[str], None] = lambda line: None  # takes each line of its output


class Child:
    """
    One run of a service; what is to be `shown` of its output goes to `say`, the last
    lines are kept, shown or not.

    `say` is called from a thread of the child's own and must not raise.
    """

    def __init__(
        self,
        service: Service,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self._clock = clock
        self._started_at = self._waited_since = clock()
        self._fault: str | None = None
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        # A session of its own: Ctrl-C reaches the launcher alone, which then stops
        # the services in order, instead of all of them twice.
        self._process = subprocess.Popen(
            service.command,
            env=dict(service.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        service.on_pid(self._process.pid)
        self._reader = threading.Thread(target=self._read, args=(say,), daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        """How it ended (negative: by that signal), or None while it runs."""
        return self._process.poll()

    def age_s(self) -> float:
        """Seconds since it was started."""
        return self._clock() - self._started_at

    def defer_deadline(self) -> None:
        """Count the time that its start takes from now on."""
        self._waited_since = self._clock()

    def is_late(self) -> bool:
        """Whether its start takes longer than it may."""
        return self._clock() - self._waited_since > self.service.start_deadline_s

    def send(self, signum: int) -> None:
        """Signal it and what it started; no effect once it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signum)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            self.service.on_pid(None)
            self._reader.join(1.0)
            return True
        return False

    def kill(self) -> None:
        """End it now."""
        self.send(signal.SIGKILL)
        self.wait(_KILL_WAIT_S)

    def tail(self) -> str:
        """Its last lines of output."""
        self._reader.join(1.0 if self.exit_code() is not None else 0.0)
        return "\n".join(list(self._lines))

    def fault(self) -> str | None:
        """The reason for its end in its own words, if it said one."""
        self._reader.join(1.0 if self.exit_code() is not None else 0.0)
        return self._fault

    def ending(self) -> str:
        """How and when it ended, in words."""
        code = self.exit_code() or 0
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return f"{self.service.name} ended {how} after {self.age_s():.1f} s"

    def _read(self, say: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            kept = self._kept(stream)
            shown = self.service.shown or prefixed(self.service.name)
            for line in shown(kept):
                say(line)

    def _kept(self, stream: Iterable[str]) -> Iterator[str]:
        prefix = self.service.fault_prefix
        for line in stream:
            line = _shown(line)
            self._lines.append(line)
            self.service.keep(line)
            if prefix and line.startswith(prefix):
                # Said once, by whoever acts on it.
                self._fault = line.removeprefix(prefix).strip()
                continue
            yield line.rstrip()


def _shown(line: str) -> str:
    """
    A line that drives no terminal: of its controls only colours and tabs are left.

    Servers write what clients send, a model's name for one.
    """
    parts = _COLOUR.split(line.rstrip("\r\n"))
    return "".join(
        part if is_colour else _CONTROL.sub(lambda m: ascii(m[0])[1:-1], part)
        for part, is_colour in zip(parts, itertools.cycle((False, True)), strict=False)
    )
