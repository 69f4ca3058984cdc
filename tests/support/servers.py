"""Real servers for tests: built as in production, on port 0."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from sidecar.app import App, build, serve_in_thread
from sidecar.config import load_config
from sidecar.engine.batch_loop import ExtraProcessors, no_extra_processors

NO_FILE = Path("/nonexistent/.env")


@contextlib.contextmanager
def running_sidecar(
    settings: dict[str, str] | None = None,
    extra_processors: ExtraProcessors = no_extra_processors,
    *,
    ready: bool = True,
) -> Iterator[App]:
    """A sidecar that answers; closed at the end."""
    flags = {
        "MLX_PORT": "0",
        "ENABLE_REQUEST_LOGGING": "false",
        "CACHE_SELFTEST": "off",  # seconds a start; tested in tests/engine
        **(settings or {}),
    }
    app = build(load_config(flags, NO_FILE, {}), extra_processors)
    thread = serve_in_thread(app)
    try:
        if ready:
            wait_ready(app.url)
        yield app
    finally:
        app.stop_listening()
        app.close()
        thread.join(5)


def wait_ready(url: str, timeout_s: float = 60.0) -> None:
    """Wait until /health says ok."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not become ready")
