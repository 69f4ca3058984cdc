"""Budgets come from the memory that the model lives in."""

import mlx.core as mx
import pytest

from sidecar.config.settings import EngineConfig
from sidecar.config.values import physical_memory
from sidecar.engine.device_memory import device_memory, process_limit


def test_a_card_with_memory_of_its_own_sets_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever RAM its host has."""
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 80 << 30})
    assert device_memory() == 80 << 30
    assert process_limit(EngineConfig()) == 72 << 30


def test_unified_memory_is_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Metal and the CPU report has no figure of that name."""
    monkeypatch.setattr(mx, "device_info", lambda: {"memory_size": 1})
    assert device_memory() == physical_memory()


def test_what_the_user_says_counts() -> None:
    assert process_limit(EngineConfig(max_process_bytes=5 << 30)) == 5 << 30


def test_a_small_machine_gets_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 6 << 30})
    assert process_limit(EngineConfig()) == 4 << 30
