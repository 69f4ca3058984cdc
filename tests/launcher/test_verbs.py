"""`litellm-mlx admin` and `stop`, and the same through install_and_run.py."""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from install_and_run import VERBS
from litellm_mlx.launcher.commands import _OF_SIDECAR, _VERBS
from sidecar.cli.commands import TOOLS
from testkit.launcher import Launcher
from testkit.servers import running_sidecar

REPO = Path(__file__).parents[2]


def verb(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "litellm_mlx.launcher", *words], cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), **env},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_page_is_opened_with_a_code_in_place_of_the_key(tmp_path: Path) -> None:
    with running_sidecar({"ADMIN_TOKEN": "a-long-token"}) as app:
        named = {"MLX_PORT": str(app.listener.port), "HOME": str(tmp_path)}
        named["LITELLM_MLX_FOLDER"] = str(tmp_path)
        done = verb("admin", "--print", ADMIN_TOKEN="a-long-token", **named)
        assert done.returncode == 0, done.stderr
        page, _, code = done.stdout.strip().partition("#code=")
        assert page == f"{app.url}/admin/"
        answer = httpx.post(f"{page}exchange", json={"code": code})
        assert answer.json() == {"key": "a-long-token"}
        wrong = verb("admin", "--print", ADMIN_TOKEN="another-token", **named)
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "wants another key: ADMIN_TOKEN" in wrong.stderr
    done = verb("admin", "--print", ADMIN_TOKEN="a-long-token", **named)
    assert done.returncode == 1
    assert "does not answer" in done.stderr


def test_what_runs_is_stopped(tmp_path: Path) -> None:
    """By the launcher's pid; a second time there is nothing to stop."""
    launcher = Launcher(tmp_path, "--no-proxy")
    try:
        launcher.wait_for("Ready.")
        named = {
            "MLX_PORT": str(launcher.port),
            "MLX_CACHE_HOME": str(tmp_path / "cache"),
            "LITELLM_MLX_FOLDER": str(tmp_path),
            "HOME": str(tmp_path),
        }
        done = verb("stop", **named)
        assert done.returncode == 0, done.stderr
        assert launcher.process.wait(60) == 0
        again = verb("stop", **named)
        assert again.returncode == 1
        assert "nothing of this project runs" in again.stderr
    finally:
        launcher.process.kill()
        launcher.process.wait()


def test_verbs_are_known_to_the_first_command() -> None:
    """It hands them on to what is installed."""
    done = subprocess.run(
        [sys.executable, str(REPO / "install_and_run.py"), "launch", "--help"],
        cwd="/", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "litellm-mlx launch" in done.stdout + done.stderr


def test_verbs_of_the_sidecar_find_the_server_and_its_key(tmp_path: Path) -> None:
    """By `.env`, from any folder: neither address nor key stands on a command line."""
    with running_sidecar({"ADMIN_TOKEN": "a-long-token"}) as app:
        lines = f"MLX_PORT={app.listener.port}\nADMIN_TOKEN=a-long-token\n"
        (tmp_path / ".env").write_text(lines)
        named = {"LITELLM_MLX_FOLDER": str(tmp_path), "HOME": str(tmp_path)}
        done = verb("ps", **named)
        assert done.returncode == 0, done.stderr
        assert app.url in done.stdout
        done = verb("list", "--key", "another", **named)
        assert (done.returncode, done.stdout) == (1, "")
        (tmp_path / ".env").write_text("MLX_PORT=what\n")
        done = verb("ps", **named)
        assert done.returncode == 2
        assert "MLX_PORT" in done.stderr


def test_both_commands_know_the_same_verbs() -> None:
    """install_and_run.py imports nothing of what it installs."""
    assert set(VERBS) == {*_VERBS, *_OF_SIDECAR}
    assert set(_OF_SIDECAR) <= TOOLS.keys()
