"""WIRED_LIMIT: nothing is wired unless it is asked for, whoever asks MLX."""

from collections.abc import Callable
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from mlx_lm.generate import wired_limit

from litellm_mlx.launcher.ready_block import HealthReport, ready_block
from litellm_mlx.launcher.settings import Flags, load_settings
from sidecar.config.device_settings import DeviceConfig
from sidecar.config.settings import load_config
from sidecar.config.sources import ConfigError
from sidecar.engine.device_memory import WiredMemory, buffer_limit, release_delay
from testkit.servers import NO_FILE, running_sidecar

MAX = 24 << 30


@pytest.fixture
def wirings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Mac's device, and what is asked of it."""
    asked: list[int] = []
    device = {"max_recommended_working_set_size": MAX, "resource_limit": 499_001}
    monkeypatch.setattr(mx, "device_info", lambda: device)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: asked.append(limit) or 0)
    return asked


def test_nothing_is_wired_by_default(
    wirings: list[int], model_folder: Callable[[str], Path]
) -> None:
    """Not even by the libraries' generators, and not when models come and go."""
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings) as app:
        with app.pool.lease("local") as served, wired_limit(served.engine.model.model):
            pass
        assert httpx.get(f"{app.url}/health", timeout=30).json()["wired"] == "off"
        status = httpx.get(f"{app.url}/admin/models/status", timeout=30).json()
        assert status["memory"]["wired"] == "off"
        assert status["memory"]["buffers_limit"] == 499_001
        assert status["memory"]["buffers"] > 0
    assert wirings == []


def test_mlx_audio_wires_nothing(wirings: list[int]) -> None:
    """Its generator for speech would, while other streams go on."""
    generate = pytest.importorskip("mlx_audio.lm.generate")
    WiredMemory(0)
    with generate.wired_limit(mx):
        pass
    assert wirings == []


def test_weights_are_wired_as_they_come_and_go(
    wirings: list[int], model_folder: Callable[[str], Path]
) -> None:
    settings = {"MODEL_PATH": str(model_folder("dense")), "WIRED_LIMIT": "weights"}
    with running_sidecar(settings) as app:
        with app.pool.lease("local") as served:
            own = served.engine.model.num_bytes
        health = httpx.get(f"{app.url}/health", timeout=30).json()
        assert health["wired"] == f"weights ({own / (1 << 30):.1f} GB)"
        assert wirings == [own]
        app.pool.unload("local", force=True)
        assert wirings == [own, 0]


def test_bytes_are_wired_up_to_the_max(wirings: list[int]) -> None:
    """MLX refuses more than the system's own limit."""
    assert WiredMemory(8 << 30).description == "8.0 GB"
    assert WiredMemory(40 << 30).description == "24.0 GB"
    assert wirings == [8 << 30, MAX]


def test_elsewhere_there_is_nothing_to_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's function stays as it is."""
    before = mx.set_wired_limit
    monkeypatch.setattr(mx, "device_info", dict)
    assert WiredMemory(8 << 30).description is None
    assert mx.set_wired_limit is before
    assert buffer_limit() is None or mx.metal.is_available()


@pytest.mark.parametrize(
    ("text", "value"),
    [("off", 0), ("OFF", 0), ("weights", "weights"), ("8GB", 8 << 30), ("0", 0)],
)
def test_what_the_setting_takes(text: str, value: int | str) -> None:
    config = load_config({"WIRED_LIMIT": text}, NO_FILE, {})
    assert config.device.wired_limit == value


@pytest.mark.parametrize(("is_metal", "steps"), [(True, 8), (False, 0)])
def test_arrays_of_ended_requests_go_later_on_metal(
    *, is_metal: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a setting; what is set holds on every device."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: is_metal)
    assert release_delay(DeviceConfig()) == steps
    assert release_delay(DeviceConfig(release_delay=3)) == 3


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="off, weights, or a size such as 8GB"):
        load_config({"WIRED_LIMIT": "all"}, NO_FILE, {})


def test_the_ready_block_says_it(tmp_path: Path) -> None:
    """On a Mac; elsewhere there is nothing to say."""
    settings = load_settings(Flags(), tmp_path, {})

    def told(wired: str | None) -> str:
        health = HealthReport(9 << 30, wired)
        return ready_block(settings, [], needs_key=False, health=health)

    assert "wired    off (WIRED_LIMIT)\n" in told("off")
    assert "wired    8.0 GB (WIRED_LIMIT; on many Macs this panics" in told("8.0 GB")
    assert "wired" not in told(None)
