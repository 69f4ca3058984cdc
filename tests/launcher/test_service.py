"""`litellm-mlx service`: the file it writes, and that it leaves nothing behind."""

import os
import plistlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from litellm_mlx.launcher.service import main as service
from litellm_mlx.launcher.service.launch_agent import LABEL, LaunchAgent
from litellm_mlx.launcher.service.program import MARK, Program
from litellm_mlx.launcher.service.systemd_unit import SystemdUnit

PROGRAM = Program(
    ('/a "b" $HOME\\c/100 %h/python', "-m", "litellm_mlx.launcher"),
    Path("/tmp/my 100 %u files"),
    Path("/tmp/service.log"),
    40,
)
_MANAGER = """#!/bin/sh
echo "$(basename "$0") $*" >> "{home}/commands"
case "$*" in *"$(cat "{home}/fails" 2>/dev/null || echo never)"*)
    echo "Failed: no bus" >&2; exit 1;; esac
"""


@dataclass
class Home:
    """A user's home, with stand-ins of the service managers on PATH."""

    path: Path

    def commands(self) -> list[str]:
        """What the managers were told since the last look."""
        file = self.path / "commands"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    def files(self) -> list[str]:
        """All files below, but the stand-ins'."""
        own = {"commands", "fails", "systemctl", "launchctl"}
        found = (f for f in self.path.rglob("*") if f.is_file() and f.name not in own)
        return sorted(str(file.relative_to(self.path)) for file in found)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemctl", "launchctl"):
        (programs / name).write_text(_MANAGER.format(home=tmp_path))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LITELLM_MLX_FOLDER", str(tmp_path))
    monkeypatch.setenv("MLX_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLX_PORT", "1")
    monkeypatch.setenv("MLX_API_KEY", "sk-a-secret-key")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return Home(tmp_path)


@pytest.fixture(params=["linux", "darwin"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "platform", request.param)
    return str(request.param)


PATHS = {
    "linux": ".config/systemd/user/litellm-mlx.service",
    "darwin": f"Library/LaunchAgents/{LABEL}.plist",
}


def test_it_is_installed_once_more_and_leaves_nothing(
    home: Home, system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """U17. No key stands in the file, whose paths are absolute."""
    file = home.path / PATHS[system]
    assert service.main(["install"]) == 0
    text = file.read_text()
    assert text in capsys.readouterr().out
    assert sys.executable in text
    assert str(home.path) in text
    assert "secret" not in text
    first = home.commands()
    assert first
    assert all(line.startswith(("systemctl", "launchctl")) for line in first)
    assert service.main(["status"]) == 0
    assert str(file) in capsys.readouterr().out
    home.commands()
    assert service.main(["install"]) == 0
    assert home.commands()[-len(first) :] == first
    assert service.main(["uninstall"]) == 0
    assert home.files() == []
    assert service.main(["uninstall"]) == 1
    assert service.main(["status"]) == 1


def test_a_start_that_fails_leaves_what_was(
    home: Home, system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing, or the file of before."""
    last = {"linux": "restart", "darwin": "bootstrap"}[system]
    (home.path / "fails").write_text(last)
    assert service.main(["install"]) == 1
    assert "no bus" in capsys.readouterr().err
    assert home.files() == []
    (home.path / "fails").write_text("never")
    assert service.main(["install"]) == 0
    file = home.path / PATHS[system]
    file.write_text(file.read_text().replace("40", "41"))
    before = file.read_text()
    (home.path / "fails").write_text(last)
    assert service.main(["install"]) == 1
    assert file.read_text() == before


def test_a_failed_second_start_runs_what_was(home: Home, system: str) -> None:
    """The old file is started again: it ran before."""
    last = {"linux": "restart", "darwin": "bootstrap"}[system]
    assert service.main(["install"]) == 0
    home.commands()
    (home.path / "fails").write_text(last)
    assert service.main(["install"]) == 1
    told = [line for line in home.commands() if last in line]
    assert len(told) == 2


@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_manager_nothing_is_left(
    home: Home,
    system: str,
    is_there: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether there is none, or one that cannot be run."""
    assert service.main(["install"]) == 0
    installed = home.files()
    assert service.main(["uninstall"]) == 0
    for name in ("systemctl", "launchctl"):
        file = home.path / "bin" / name
        file.chmod(0o644) if is_there else file.unlink()
    monkeypatch.setenv("PATH", str(home.path / "bin"))
    assert service.main(["install"]) == 1
    assert ("cannot be run" if is_there else "there is no") in capsys.readouterr().err
    assert home.files() == []
    file = home.path / installed[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# {MARK}")
    assert service.main(["uninstall"]) == 1
    assert "It may run still" in capsys.readouterr().err
    assert home.files() == []


def test_a_folder_that_would_break_the_file_is_refused(
    home: Home,
    system: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = home.path / "new\nline"
    folder.mkdir()
    monkeypatch.setenv("LITELLM_MLX_FOLDER", str(folder))
    assert service.main(["install"]) == 1
    assert "control character" in capsys.readouterr().err
    assert home.files() == []


def test_a_file_of_somebody_else_stays(
    home: Home, system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home.path / PATHS[system]
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    for verb in ("install", "uninstall", "status"):
        assert service.main([verb]) == 1
        assert "was not written by this command" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert home.commands() == []


def test_it_can_be_printed_only(
    home: Home, system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service.main(["install", "--print"]) == 0
    assert MARK in capsys.readouterr().out
    assert (home.files(), home.commands()) == ([], [])


def test_another_system_is_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert service.main(["install"]) == 1
    assert "macOS and Linux only" in capsys.readouterr().err


def test_logs_are_the_servers_own(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service.main(["logs"]) == 1
    assert "never run" in capsys.readouterr().err
    log = home.path / "cache" / "servers.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(f"line {n}\n" for n in range(9)))
    assert service.main(["logs", "-n", "2"]) == 0
    assert capsys.readouterr().out == "line 7\nline 8\n"
    assert service.main(["logs", "-n", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_logs_go_on_where_the_file_is_a_new_one(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at 10 MB."""
    log = home.path / "cache" / "servers.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("old\n")
    turns = iter(["rotate", "wait"])

    def sleep(_seconds: float) -> None:
        turn = next(turns, "end")
        if turn == "rotate":
            log.rename(log.with_name("servers.log.1"))
            log.write_text("new\n")
        elif turn == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(service.time, "sleep", sleep)
    assert service.main(["logs", "-f"]) == 0
    assert capsys.readouterr().out == "old\nnew\n"


def test_the_agent_says_what_launchd_needs() -> None:
    """Restarted only where it failed; long enough to end its answers."""
    text = LaunchAgent(Path("/Users/me")).text(PROGRAM)
    assert MARK.encode() in text
    fields = plistlib.loads(text)
    assert fields["ProgramArguments"] == [*PROGRAM.arguments]
    assert fields["WorkingDirectory"] == str(PROGRAM.folder)
    assert fields["KeepAlive"] == {"SuccessfulExit": False}
    assert fields["ExitTimeOut"] == 40
    assert fields["RunAtLoad"] is True


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """It warns of what it does not know, with exit code 0: nothing may be said."""
    real = tmp_path / "100 % of my $HOME"
    real.mkdir()
    shutil.copy("/bin/true", real / "python")
    program = Program(
        (str(real / "python"), *PROGRAM.arguments), real, PROGRAM.output, 40
    )
    unit = tmp_path / "litellm-mlx.service"

    def verified(text: bytes) -> str:
        unit.write_bytes(text)
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(unit)],
            env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": os.environ["PATH"]},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stderr

    text = SystemdUnit(tmp_path).text(program)
    assert verified(text) == ""
    assert "Unknown key" in verified(text.replace(b"RestartSec", b"RestartSecs"))
    assert verified(text.replace(b"/python", b"/other")) != ""
