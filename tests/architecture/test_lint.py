"""The linters' own verdicts."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],  # strict, three packages: see pyproject.toml
    ],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_the_whole_tree_passes(command: list[str]) -> None:
    """No complaint anywhere."""
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPO, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_mypy_is_strict() -> None:
    """Nobody has relaxed it, nor left a package out."""
    text = (REPO / "pyproject.toml").read_text()
    mypy = text.partition("[tool.mypy]")[2].partition("\n[")[0]
    assert "strict = true" in mypy
    assert 'packages = ["sidecar", "litellm_mlx", "bench"]' in mypy
