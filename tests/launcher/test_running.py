"""Verbs find the one start that runs, by its files."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from litellm_mlx.launcher.running import at_running_ports
from litellm_mlx.launcher.settings import Flags, LaunchSettings, load_settings

_HOLDS = """
import sys
from pathlib import Path
from litellm_mlx.launcher.ports import PidFile
files = [PidFile(Path(path)) for path in sys.argv[1:]]
assert all([file.lock() for file in files])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchSettings:
    for name in ("MLX_PORT", "MLX_SERVER_PORT", "PROXY_PORT"):
        monkeypatch.delenv(name, raising=False)
    return load_settings(Flags(), tmp_path, {"MLX_CACHE_HOME": str(tmp_path / "cache")})


@contextmanager
def started(settings: LaunchSettings, sidecar: int, proxy: int) -> Iterator[None]:
    """A process that holds the files as a launcher does."""
    names = (f"sidecar-{sidecar}.pid", f"litellm-{proxy}.pid")
    files = [str(settings.run_dir / name) for name in names]
    command = [sys.executable, "-c", _HOLDS, *files]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield


def ports(settings: LaunchSettings) -> tuple[int, int]:
    assert settings.proxy is not None
    return settings.sidecar.port, settings.proxy.port


def test_a_start_on_other_ports_is_found(settings: LaunchSettings) -> None:
    """One that ended is none, though its files stay."""
    assert ports(at_running_ports(settings)) == (8080, 4000)
    with started(settings, 18431, 14431):
        found = at_running_ports(settings)
        assert ports(found) == (18431, 14431)
        assert found.child_env["MLX_PORT"] == "18431"
        assert found.child_env["PROXY_PORT"] == "14431"
    assert ports(at_running_ports(settings)) == (8080, 4000)


def test_ports_that_are_set_count(
    settings: LaunchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(settings, 18431, 14431):
        monkeypatch.setenv("PROXY_PORT", "4001")
        assert ports(at_running_ports(settings)) == (8080, 4000)
        monkeypatch.delenv("PROXY_PORT")
        settings.env_path.write_text("MLX_PORT=8080\n")
        assert ports(at_running_ports(settings)) == (8080, 4000)


def test_of_several_none_is_chosen(settings: LaunchSettings) -> None:
    with ExitStack() as stack:
        stack.enter_context(started(settings, 18431, 14431))
        stack.enter_context(started(settings, 18432, 14432))
        assert ports(at_running_ports(settings)) == (8080, 4000)


def test_who_looks_writes_nothing(settings: LaunchSettings) -> None:
    """The launcher that a file names stays the one that wrote it."""
    with started(settings, 18431, 14431):
        pass
    before = {path: path.read_bytes() for path in settings.run_dir.glob("*.pid")}
    at_running_ports(settings)
    assert {path: path.read_bytes() for path in before} == before
    assert len(before) == 2
