"""What /health says of a model that failed a test at its load."""

import logging

import httpx
import pytest

from sidecar.app import App
from sidecar.engine import text_engine
from sidecar.infra.metrics import HEALTHY_AT_ZERO
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
