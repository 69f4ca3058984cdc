"""selftest on real models, good and bad."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.__main__ import main
from sidecar.cli import selftest


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no .env names a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODEL_PATH", raising=False)


def outcomes(shown: str) -> dict[str, str]:
    """Path -> outcome, from the table."""
    lines = [line.split() for line in shown.splitlines()]
    head = next(i for i, line in enumerate(lines) if line[:1] == ["path"])
    return {line[0]: line[1] for line in lines[head + 1 :] if len(line) == 6}


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_reuse_is_proved_on_a_model(
    kind: str,
    model_folder: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every way of reuse, with what was moved, computed and is allowed."""
    assert main(["selftest", str(model_folder(kind))]) == 0
    shown = capsys.readouterr().out
    found = outcomes(shown)
    assert {"restore", "lend", "trim", "branch", "checkpoint", "batch"} <= set(found)
    assert set(found.values()) == {"ok"}
    assert f"{len(found)} ok" in shown
    assert "splitter of thinking, text and calls: ok" in shown


@pytest.mark.parametrize("arguments", [["built-in"], []])
def test_the_built_in_model_is_the_default(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", *arguments]) == 0
    assert "mlx-tiny-agent" in capsys.readouterr().out


def test_the_configured_model_is_taken_if_none_is_named(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """MODEL_PATH of the .env, as when serving."""
    (tmp_path / ".env").write_text(f"MODEL_PATH={model_folder('dense')}\n")
    assert main(["selftest"]) == 0
    assert capsys.readouterr().out.startswith("dense:")
    (tmp_path / ".env").write_text("MLX_PORT=many\n")
    assert main(["selftest"]) == 2


def test_a_failed_path_ends_with_1(
    model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model whose attention does not know a batch's mask."""
    assert main(["selftest", str(model_folder("capped"))]) == 1
    assert outcomes(capsys.readouterr().out)["batch"] == "failed"


def test_a_splitter_that_fails_ends_with_1(
    model_folder: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what it did."""
    monkeypatch.setattr(selftest, "splitter_faults", lambda syntax: ("thinking: x",))
    assert main(["selftest", str(model_folder("dense"))]) == 1
    assert "splitter FAILED: thinking: x" in capsys.readouterr().out


def test_a_model_that_is_not_there_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["selftest", "/no/such/model"]) == 1
    assert "no such folder" in capsys.readouterr().err
