"""What is shown of the memory after a clear is what is left."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

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


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/admin/cache/clear", {"model": "nosuch"}, None),
        ("/admin/cache/clear", {"session": "nosuch"}, None),
        ("/admin/cache/clear?modl=nosuch", {}, "modl"),
        ("/admin/cache/clear?model=local&model=local", {}, "model"),
        ("/admin/models/local/load?pin=maybe", {}, "pin"),
        ("/admin/models/local/load?pn=true", {}, "pn"),
        ("/admin/models/local/load", {"pin": True}, None),
        ("/admin/models/local/unload?force=x", {}, "force"),
        ("/admin/models/rescan", {"deep": True}, None),
        ("/admin/reload-config", {"RATE_LIMIT_RPM": 1}, None),
    ],
    ids=str,
)
def test_what_would_have_no_effect_is_refused(
    model_folder: Callable[[str], Path], path: str, body: object, param: str | None
) -> None:
    """Nothing is forgotten, loaded or let go by it."""
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        asked = {"model": "local", "prompt": "Many words. " * 30, "max_tokens": 1}
        httpx.post(f"{app.url}/v1/completions", json=asked, timeout=60)
        stored = app.shared.stored.num_bytes
        refused = httpx.post(f"{app.url}{path}", json=body, timeout=60)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
        assert app.shared.stored.num_bytes == stored > 0
        assert not any(entry.pinned for entry in app.pool.entries())
        for query in ("/admin/logs?bogus=1", "/admin/cache/drift?modl=x"):
            assert httpx.get(f"{app.url}{query}", timeout=60).status_code == 400
