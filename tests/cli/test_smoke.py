"""`tools/smoke.py`, by which CI tries the Pythons it does not run the suite on."""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is tried, to plant faults in."""
    folder = tmp_path_factory.mktemp("tree")
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("sidecar", "litellm_mlx", "tools"):
        shutil.copytree(REPO / name, folder / name, ignore=leave)
    shutil.copy(REPO / ".env.example", folder)
    return folder


def smoke_of(tree: Path) -> ModuleType:
    """The script of that tree, as a module."""
    spec = importlib.util.spec_from_file_location("smoke", tree / "tools" / "smoke.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def planted(file: Path, line: str) -> Iterator[None]:
    before = file.read_text()
    file.write_text(f"{before}\n{line}\n")
    try:
        yield
    finally:
        file.write_text(before)


def test_a_module_that_cannot_be_imported_is_named(tree: Path) -> None:
    """Exit 1 with the reason, whatever `pip` thinks of the installation."""
    with planted(tree / "sidecar" / "core" / "events.py", "1 / 0"):
        ended = subprocess.run(
            [sys.executable, str(tree / "tools" / "smoke.py")],
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert "BROKEN: import sidecar" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr


def test_the_users_settings_are_not_what_is_tried(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers whatever is set: a model that is not there, a key, a taken port."""
    monkeypatch.setenv("MODEL_PATH", "/nowhere")
    monkeypatch.setenv("MLX_API_KEY", "secret-key")
    monkeypatch.setenv("MLX_SERVER_PORT", "1")
    assert "built-in demo model" in smoke_of(tree).ask(str(tmp_path))


def test_a_server_that_cannot_answer_is_told(tree: Path, tmp_path: Path) -> None:
    """The reason holds what the sidecar said and what it wrote."""
    smoke = smoke_of(tree)
    fault = "ChatService.start_chat = None"
    with (
        planted(tree / "sidecar" / "service" / "chat.py", fault),
        pytest.raises(smoke.Broken, match=r"no answer: .*500(.|\n)*NoneType"),
    ):
        smoke.ask(str(tmp_path))
