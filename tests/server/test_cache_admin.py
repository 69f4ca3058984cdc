"""What is shown of the memory after a clear is what is left."""

from collections.abc import Callable
from pathlib import Path

import httpx

from testkit.servers import running_sidecar


def test_active_memory_is_that_after_the_clear(
    model_folder: Callable[[str], Path],
) -> None:
    """An idle server looks at its memory no more by itself."""
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        body = {"model": "local", "prompt": "Many words. " * 300, "max_tokens": 1}
        httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)

        def active() -> int:
            url = f"{app.url}/admin/models/status"
            memory: dict[str, int] = httpx.get(url, timeout=60).json()["memory"]
            return memory["active"]

        app.gpu.call(app.shared.process.sample)
        before = active()
        cleared = httpx.post(f"{app.url}/admin/cache/clear", timeout=60).json()
        assert cleared["kv_bytes"] > 0
        assert active() <= before - cleared["kv_bytes"] // 2
