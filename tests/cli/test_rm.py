"""`mlx-sidecar rm`: a model of the hub's cache goes, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit.hub import running_hub
from testkit.servers import running_sidecar

REPO = Path(__file__).parents[2]


def run(home: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *words], cwd=home, env={**own, **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


@pytest.fixture
def home(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A home whose cache has one model, and beside it a folder of the user's."""
    files = {file.name: file.read_bytes() for file in model_folder("dense").iterdir()}
    with running_hub("org/tiny", files) as hub:
        done = run(tmp_path, "pull", "org/tiny", **hub.environment(str(tmp_path)))
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    return tmp_path


def test_it_is_removed_when_it_is_meant(home: Path) -> None:
    """And the bytes are those that really came back."""
    env = {"HF_HOME": str(home)}
    here = home / "hub" / "models--org--tiny"
    size = sum(f.stat().st_size for f in here.glob("blobs/*"))
    nobody = ("--url", "http://127.0.0.1:9")
    asked = run(home, "rm", "org/tiny", *nobody, **env)
    assert (asked.returncode, "--yes" in asked.stderr) == (1, True)
    assert here.exists()
    done = run(home, "rm", "org/tiny", "--yes", *nobody, **env)
    assert done.returncode == 0, done.stderr
    assert f"{size / 1e6:.0f} MB came back" in done.stdout
    assert not here.exists()
    again = run(home, "rm", "org/tiny", "--yes", *nobody, **env)
    assert (again.returncode, "is not in" in again.stderr) == (1, True)


@pytest.mark.parametrize("name", ["mine", "../mine", "/etc", "models--org--tiny"])
def test_nothing_else_is(home: Path, name: str) -> None:
    nobody = ("--url", "http://127.0.0.1:9")
    done = run(home, "rm", name, "--yes", *nobody, HF_HOME=str(home))
    assert (done.returncode, "is not in the hub's cache" in done.stderr) == (1, True)
    assert (home / "mine" / "config.json").exists()
    assert (home / "hub" / "models--org--tiny").exists()


def test_a_loaded_model_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot,) = (home / "hub" / "models--org--tiny" / "snapshots").iterdir()
    aliases = '{"org/tiny": "default"}'
    with running_sidecar(
        {"MODEL_PATH": str(snapshot), "MODEL_ALIASES": aliases}
    ) as app:
        done = run(home, "rm", "org/tiny", "--yes", "--url", app.url, HF_HOME=str(home))
    assert (done.returncode, "is loaded" in done.stderr) == (1, True)
