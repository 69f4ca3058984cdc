"""Real servers for tests: built as in production, on port 0."""

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from sidecar.app import App, build, serve_in_thread
from sidecar.config.names import known_names
from sidecar.config.setting_sources import SettingSources
from sidecar.engine.scheduler import ExtraProcessors, no_extra_processors
from sidecar.server.listener import Listener

NO_FILE = Path("/nonexistent/.env")


@contextlib.contextmanager
def running_sidecar(
    settings: dict[str, str] | None = None,
    extra_processors: ExtraProcessors = no_extra_processors,
    *,
    ready: bool = True,
) -> Iterator[App]:
    """A sidecar that answers; closed at the end."""
    home = tempfile.TemporaryDirectory()
    flags = {
        "MLX_PORT": "0",
        "MODEL_DIR": "none",  # not what this machine's user has downloaded
        "ENABLE_REQUEST_LOGGING": "false",
        "MLX_CACHE_HOME": home.name,  # nothing of this machine's user is read
        "CACHE_SELFTEST": "off",  # seconds a start; tested in tests/engine
        **(settings or {}),
    }
    unread = flags.keys() - known_names()
    assert not unread, f"no setting is called {unread}"
    sources = SettingSources(flags, NO_FILE, {})
    app = build(sources.config(), extra_processors, sources=sources)
    thread = serve_in_thread(app)
    try:
        if ready:
            wait_ready(app.url)
        yield app
    finally:
        app.stop_listening()
        app.close()
        thread.join(60)
        home.cleanup()


@contextlib.contextmanager
def held_gpu(app: App) -> Iterator[threading.Event]:
    """The GPU thread does nothing, as in one long chunk, until the event is set."""
    go, is_held = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go.wait(280)

    app.gpu.post(hold)
    assert is_held.wait(120)
    try:
        yield go
    finally:
        go.set()


def metric(app: App, name: str) -> float:
    """The sum of all samples in /metrics whose names, with labels, begin so."""
    text = httpx.get(f"{app.url}/metrics", timeout=120).text
    found = [line.split()[-1] for line in text.splitlines() if line.startswith(name)]
    return sum(map(float, found))


def num_left(app: App) -> float:
    """Jobs that ended because their clients left, before their answers did."""
    return metric(app, 'mlx_jobs_ended_total{reason="client_gone"}')


def wait_ready(url: str, timeout_s: float = 180.0) -> None:
    """
    Wait until /health says ok.

    Raises:
        RuntimeError: the default model cannot be loaded; what /health says of it.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            health = httpx.get(f"{url}/health", timeout=60).json()
            if health["status"] == "ok":
                return
            if health["status"] == "degraded":
                raise RuntimeError(f"{url} has no model: {health}")
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not become ready")


def threads_of(app: App) -> set[threading.Thread]:
    """All threads but those of other servers: their clients come when they do."""

    def is_anothers(thread: threading.Thread) -> bool:
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        return isinstance(owner, Listener) and owner is not app.listener

    return {thread for thread in threading.enumerate() if not is_anothers(thread)}
