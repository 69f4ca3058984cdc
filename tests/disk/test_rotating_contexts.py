"""A context that rotates takes no more of a slot than its window."""

from pathlib import Path

import httpx

from sidecar.app import App
from testkit.raw_http import eventually
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

IDS = [5 + number * 37 % 900 for number in range(600)]


def counter(app: App, name: str) -> float:
    lines = httpx.get(f"{app.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def cached(app: App, **more: int) -> int:
    body = {"prompt": IDS, "max_tokens": 2, "temperature": 0, **more}
    answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_the_disk_brings_back_a_window_alone(tmp_path: Path) -> None:
    settings = {
        "MODEL_PATH": str(make_model(tmp_path / "dense", "dense")),
        "MLX_CACHE_HOME": str(tmp_path / "home"),
        "KV_DISK_PERSISTENCE": "true",
        "KV_DISK_QUIET_SECONDS": "0",
        "KV_DISK_MIN_PREFIX_TOKENS": "16",
        "KV_DISK_RESTORE": "always",
        "CACHE_SELFTEST": "on_load",
    }
    with running_sidecar(settings) as app:
        assert cached(app) == 0
        assert eventually(lambda: counter(app, "mlx_cache_disk_bytes_written") > 0)
    with running_sidecar(settings) as app:
        assert cached(app, context_len=64) == 63
        assert 0 < counter(app, "mlx_cache_disk_tokens_restored") <= 64
