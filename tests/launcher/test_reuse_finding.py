"""What doctor says of reuse, and of a folder that nothing can be written into."""

import os
from pathlib import Path
from typing import Any

import pytest

from litellm_mlx.launcher.doctor.servers import _reuse
from litellm_mlx.launcher.doctor.set_up import _disk


def state(prompt: int, reused: int, *causes: tuple[str, int]) -> dict[str, Any]:
    done = {"prompt_tokens": prompt, "reused_tokens": reused}
    rows = [{"cause": cause, "lost": lost} for cause, lost in causes]
    return {"savings": {"start": done}, "causes": rows}


def test_the_dearest_cause_is_named_where_little_is_reused() -> None:
    causes = (("first_seen", 0), ("tools", 70_000), ("text", 11))
    (found,) = _reuse(state(100_000, 10_000, *causes))
    assert found.state == "warn"
    assert "10% of prompt tokens" in found.found
    assert "dearest cause: tools, 70,000 tokens" in found.found


@pytest.mark.parametrize(
    "told",
    [state(100_000, 90_000, ("tools", 9)), state(100_000, 10, ("first_seen", 0))],
)
def test_where_nothing_is_lost_all_is_well(told: dict[str, Any]) -> None:
    (found,) = _reuse(told)
    assert found.state == "ok"


def test_a_few_tokens_say_nothing() -> None:
    assert list(_reuse(state(9_999, 0, ("tools", 9_000)))) == []


def test_a_folder_that_cannot_be_written_to_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root, who runs tests in a container, may write anywhere: so access is asked."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    words = [found.found for found in _disk(tmp_path / "not there")]
    assert f"{tmp_path} cannot be written to" in words
