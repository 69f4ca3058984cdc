"""Flags, environment and `.env`: which one wins."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from litellm_mlx.launcher.settings import (
    Address,
    Flags,
    SettingsError,
    create_master_key,
    load_settings,
    merged_environment,
)


def test_defaults(tmp_path: Path) -> None:
    """With nothing set, both servers are on loopback and the model is built in."""
    settings = load_settings(Flags(), tmp_path, {})
    assert settings.sidecar == Address("127.0.0.1", 8080)
    assert settings.proxy == Address("127.0.0.1", 4000)
    assert settings.model_path is None
    assert settings.drain_timeout_s == 30.0


def test_later_sources_win(tmp_path: Path) -> None:
    """A flag beats the environment, which beats `.env`."""
    (tmp_path / ".env").write_text("MLX_PORT=1001\nPROXY_PORT=1002\nMODEL_PATH=file\n")
    env = {"PROXY_PORT": "2002", "MODEL_PATH": "environment"}
    settings = load_settings(Flags(model="flag"), tmp_path, env)
    assert settings.sidecar.port == 1001
    assert settings.proxy == Address("127.0.0.1", 2002)
    assert settings.model_path == "flag"


def test_a_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model's and in the config's path; the sidecar reads the flag by itself."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / ".env").write_text("MODEL_PATH=~/models/x\n")
    settings = load_settings(Flags(config="~/mine.yaml"), tmp_path, {})
    assert settings.model_path == "/home/me/models/x"
    assert settings.config_path == Path("/home/me/mine.yaml")
    chosen = load_settings(Flags(model="~/y"), tmp_path, {})
    assert (chosen.model_path, chosen.model_flag) == ("/home/me/y", "~/y")


def test_the_file_may_beat_the_environment(tmp_path: Path) -> None:
    """ENV_FILE_OVERRIDES turns the order of `.env` and environment round."""
    (tmp_path / ".env").write_text("ENV_FILE_OVERRIDES=yes\nMLX_PORT=1001\n")
    assert load_settings(Flags(), tmp_path, {"MLX_PORT": "2001"}).sidecar.port == 1001


def test_blank_values_count_as_not_set(tmp_path: Path) -> None:
    """A blank variable neither hides `.env` nor is an error."""
    (tmp_path / ".env").write_text("MLX_PORT=1001\nMODEL_PATH=\n")
    settings = load_settings(Flags(), tmp_path, {"MLX_PORT": " ", "PROXY_PORT": ""})
    assert settings.sidecar.port == 1001
    assert settings.model_path is None


@pytest.mark.parametrize("name", ["MLX_SERVER_PORT", "MLX_SERVER_MLX_PORT"])
def test_other_spellings_are_read(tmp_path: Path, name: str) -> None:
    """Older and general names of a setting work."""
    assert load_settings(Flags(), tmp_path, {name: "1234"}).sidecar.port == 1234


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("PROXY_PORT", "0", "PROXY_PORT must be a port 1..65535, got '0'"),
        ("MLX_PORT", "-1", "MLX_PORT must be a port 1..65535, got '-1'"),
        ("PROXY_PORT", "http", "PROXY_PORT must be a port 1..65535, got 'http'"),
        ("DRAIN_TIMEOUT_SECONDS", "nan", "DRAIN_TIMEOUT_SECONDS must be seconds"),
        ("ENV_FILE_OVERRIDES", "perhaps", "ENV_FILE_OVERRIDES must be true or false"),
        ("MLX_PORT", "4000", "MLX_PORT and PROXY_PORT must differ"),
    ],
)
def test_a_bad_value_names_its_variable(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """A value out of range stops the start and names the variable."""
    with pytest.raises(SettingsError, match=message):
        load_settings(Flags(), tmp_path, {name: text})


def test_children_see_the_file_and_the_flags(tmp_path: Path) -> None:
    """Keys from `.env` reach LiteLLM, and a port flag reaches the plugin."""
    (tmp_path / ".env").write_text("ANTHROPIC_API_KEY=secret\n")
    env = load_settings(Flags(port=1234), tmp_path, {"HOME": "/x"}).child_env
    assert env["ANTHROPIC_API_KEY"] == "secret"
    assert env["MLX_PORT"] == "1234"
    assert env["HOME"] == "/x"
    assert env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"


def test_a_folders_own_files_do_not_run(tmp_path: Path) -> None:
    """Of the folder of the start, nor of one that its `.env` names."""
    planted = "import sys; print('PLANTED'); sys.exit(3)"
    (tmp_path / "sidecar").mkdir()
    for name in ("sidecar/__init__", "sidecar/__main__", "sitecustomize", "dotenv"):
        (tmp_path / f"{name}.py").write_text(planted)
    (tmp_path / ".env").write_text(f"PYTHONPATH={tmp_path}\n")
    env = load_settings(Flags(), tmp_path, {"PATH": os.environ["PATH"]}).child_env
    ended = subprocess.run(
        [sys.executable, "-m", "sidecar", "--help"],
        cwd=tmp_path, env=dict(env), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "PLANTED" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("host", "url", "is_loopback"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", True),
        ("localhost", "http://localhost:80", True),
        ("0.0.0.0", "http://127.0.0.1:80", False),
        ("::", "http://[::1]:80", False),
        ("::1", "http://[::1]:80", True),
        ("192.168.0.5", "http://192.168.0.5:80", False),
    ],
)
def test_addresses(host: str, url: str, is_loopback: bool) -> None:
    """An address knows how this machine reaches it, and whether others can."""
    address = Address(host, 80)
    assert address.url == url
    assert address.is_loopback is is_loopback


def test_a_master_key_is_added_to_the_file(tmp_path: Path) -> None:
    """The key is found again at the next start, beside what was there, and private."""
    env_file = tmp_path / ".env"
    env_file.write_text("MLX_PORT=1001\nLITELLM_MASTER_KEY=")
    key = create_master_key(env_file)
    assert merged_environment(env_file, {}) == {
        "MLX_PORT": "1001",
        "LITELLM_MASTER_KEY": key,
    }
    assert stat.S_IMODE(env_file.stat().st_mode) == 0o600
    assert len(key) > 40
