"""What /health says of a model that failed a test at its load."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.engine import text_engine
from sidecar.engine.loading import loader, reachable_arrays
from sidecar.infra.metrics import HEALTHY_AT_ZERO
from testkit.raw_http import eventually
from testkit.servers import running_sidecar


def test_a_good_model_failed_nothing(app: App) -> None:
    """Its splitter is tried at each load, whatever CACHE_SELFTEST says."""
    assert httpx.get(f"{app.url}/health", timeout=60).json()["failed_tests"] == []
    report = httpx.get(f"{app.url}/admin/cache", timeout=60).json()
    assert report["selftest"] == {"splitter": "ok"}


def test_the_line_at_a_models_start_names_what_should_stay_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """How it reuses, how its tests went, and the counters: none has moved."""
    with caplog.at_level(logging.INFO, "sidecar.residents"), running_sidecar() as app:
        counters = httpx.get(f"{app.url}/admin/cache", timeout=60).json()["counters"]
    (line,) = [m for m in caplog.messages if m.startswith("ready to reuse ")]
    told = dict(word.split("=") for word in line.split()[3:])
    assert told.pop("layers") == "8xKVCache"
    assert told.pop("checkpoints") == "not-needed"
    assert (told.pop("splicing"), told.pop("selftest")) == ("on", "splitter:ok")
    assert set(told) == set(HEALTHY_AT_ZERO) <= set(counters)
    assert set(told.values()) == {"0"}


def test_a_splitter_that_fails_is_told_in_the_log_and_by_health(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model answers all the same: it may be one kind of output that goes wrong."""
    monkeypatch.setattr(
        text_engine, "splitter_faults", lambda syntax: ("thinking: lost",)
    )
    with caplog.at_level(logging.ERROR), running_sidecar() as broken:
        health = httpx.get(f"{broken.url}/health", timeout=60)
    assert (health.status_code, health.json()["failed_tests"]) == (200, ["splitter"])
    assert "splitter of family qwen3: thinking: lost" in caplog.text


def test_health_says_how_much_of_a_models_weights_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While they are read, slice by slice; the page shows the same."""
    monkeypatch.setattr(reachable_arrays, "_SLICE_BYTES", 1 << 14)
    in_slices, go_on = loader.evaluate_in_slices, threading.Event()

    def one_by_one(model: Any) -> Iterator[int]:
        for nth, num_bytes in enumerate(in_slices(model)):
            yield num_bytes
            assert nth or go_on.wait(60)

    monkeypatch.setattr(loader, "evaluate_in_slices", one_by_one)
    with running_sidecar(ready=False) as app:

        def health() -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{app.url}/health", timeout=60).json()
            return found

        def default_model() -> dict[str, Any]:
            answer = httpx.get(f"{app.url}/admin/state", timeout=60).json()
            found: dict[str, Any] = answer["models"][0]
            return found

        assert eventually(lambda: "load" in health(), 60)
        load = health()["load"]
        assert 0 < load["done_bytes"] < load["total_bytes"]
        assert default_model()["read_bytes"] == load["done_bytes"]
        go_on.set()
        assert eventually(lambda: health()["status"] == "ok", 60)
        assert "load" not in health()
        assert default_model()["read_bytes"] is None
