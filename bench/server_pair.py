"""The launcher's two servers as the system sees them: files, threads, memory."""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from testkit.launcher import Launcher

_REPOSITORY = Path(__file__).parents[1]
NAMES = ("litellm", "sidecar")
_TOKEN = "bench-admin"
_SAMPLE_S = 0.5
_POLL_S = 0.05
# What is kept for reuse has its own budget: here it is full soon.
_SETTINGS = {
    "ADMIN_TOKEN": _TOKEN,
    "PREFILL_STEP_SIZE": "256",
    "PROMPT_CACHE_MAX_BYTES": "16MB",
    "HEALING_STORE_MAX_BYTES": "4MB",
    "MAX_KV_SIZE": "8192",
    # Who names no limit gets a whole context else: a minute of honest work.
    "DEFAULT_MAX_TOKENS": "256",
    "LOG_MAX_MB": "64",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one process."""

    num_fds: int
    num_threads: int
    rss_bytes: int

    def __str__(self) -> str:
        rss = self.rss_bytes / (1 << 20)
        return f"{self.num_fds} fds, {self.num_threads} threads, {rss:.0f} MiB"


@dataclass(frozen=True, slots=True)
class Outage:
    """When the sidecar was killed, and when it answered again."""

    killed_at: float
    back_at: float


class ServerPair:
    """A running launcher; its children may change."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.ports = {"litellm": launcher.proxy_port, "sidecar": launcher.port}
        self.outages: list[Outage] = []
        self.num_kills = 0
        self.maximum: dict[str, Figures] = {}
        self._over = threading.Event()

    @property
    def url(self) -> str:
        """Where LiteLLM listens."""
        return self._launcher.url

    @property
    def said(self) -> str:
        """All that the launcher printed."""
        return self._launcher.output

    def figures(self) -> dict[str, Figures]:
        """Of both servers, now."""
        return {name: _figures(self._process(name)) for name in NAMES}

    def forget(self) -> None:
        """Clear the sidecar's memory."""
        answer = httpx.post(
            f"http://127.0.0.1:{self.ports['sidecar']}/admin/cache/clear",
            headers={"Authorization": f"Bearer {_TOKEN}"}, timeout=60,
        )  # fmt: skip
        answer.raise_for_status()

    def kill_sidecar(self, within_s: float = 240.0) -> None:
        """kill -9, and wait until another one answers."""
        old, killed_at = self._process("sidecar"), time.monotonic()
        self.num_kills += 1
        os.kill(old.pid, signal.SIGKILL)
        deadline = killed_at + within_s
        while not self._is_healthy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no sidecar within {within_s:g} s:\n{self.said}")
            time.sleep(_POLL_S)
        self.outages.append(Outage(killed_at, time.monotonic()))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note the most that each server takes meanwhile."""
        self._over.clear()
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                for name, now in self.figures().items():
                    before = self.maximum.get(name, now)
                    self.maximum[name] = Figures(
                        max(before.num_fds, now.num_fds),
                        max(before.num_threads, now.num_threads),
                        max(before.rss_bytes, now.rss_bytes),
                    )

    def _is_healthy(self) -> bool:
        url = f"http://127.0.0.1:{self.ports['sidecar']}/health"
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url, timeout=2, trust_env=False)
            return bool(answer.json()["status"] == "ok")
        return False

    def _process(self, name: str) -> psutil.Process:
        pid = self._launcher.pid_of(name, self.ports[name])
        if pid is None:
            raise ProcessLookupError(f"no {name} runs")
        return psutil.Process(pid)


@contextlib.contextmanager
def running_pair(folder: Path, model: Path) -> Iterator[ServerPair]:
    """The launcher as users run it, with small budgets; stopped at the end."""
    # As beside install_and_run.py: LiteLLM's own defaults would try each thing thrice.
    shutil.copy(_REPOSITORY / "litellm_config.yaml", folder)
    launcher = Launcher(folder, port=None, MODEL_PATH=str(model), **_SETTINGS)
    try:
        launcher.wait_for("Ready.")
        yield ServerPair(launcher)
    finally:
        launcher.process.terminate()
        launcher.wait()


def _figures(process: psutil.Process) -> Figures:
    with process.oneshot():
        return Figures(
            process.num_fds(), process.num_threads(), process.memory_info().rss
        )
