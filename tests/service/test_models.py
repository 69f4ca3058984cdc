"""What /health says of a model that failed a test at its load."""

import logging

import httpx
import pytest

from sidecar.app import App
from sidecar.engine import text
from tests.support.servers import running_sidecar


def test_a_good_model_failed_nothing(app: App) -> None:
    """Its splitter is tried at each load, whatever CACHE_SELFTEST says."""
    assert httpx.get(f"{app.url}/health", timeout=60).json()["failed_tests"] == []
    report = httpx.get(f"{app.url}/admin/cache", timeout=60).json()
    assert report["selftest"] == {"splitter": "ok"}


def test_a_splitter_that_fails_is_told_in_the_log_and_by_health(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model answers all the same: it may be one kind of output that goes wrong."""
    monkeypatch.setattr(text, "splitter_faults", lambda syntax: ("thinking: lost",))
    with caplog.at_level(logging.ERROR), running_sidecar() as broken:
        health = httpx.get(f"{broken.url}/health", timeout=60)
    assert (health.status_code, health.json()["failed_tests"]) == (200, ["splitter"])
    assert "splitter of family qwen3: thinking: lost" in caplog.text
