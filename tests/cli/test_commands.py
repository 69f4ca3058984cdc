"""The command line: tools by name, everything else serves."""

import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.__main__ import main
from sidecar.app import App
from sidecar.cli.commands import TOOLS

REPO = Path(__file__).parents[2]


def cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m sidecar` to its end."""
    command = [sys.executable, "-m", "sidecar", *arguments]
    return subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )


def test_help_names_every_tool_on_one_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 58
    assert max(len(line) for line in shown.splitlines()) <= 80
    for name in TOOLS:
        assert f" {name} " in shown


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_has_a_help_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"mlx-sidecar {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["prob"],
        ["--port", "0", "probe"],
        ["probe", "--turns", "2"],
        ["probe", "--turns", "many"],
        ["probe", "--scenario", "rain"],
        ["probe", "--url", "localhost:8080"],
        ["probe", "--questions", "3"],
        ["probe", "--quality", "--depth", "10"],
        ["probe", "--quality", "--url", "http://127.0.0.1:8080"],
        ["inspect-cache", "--url", "file:///etc/passwd"],
        ["diff-turns"],
        ["selftest", "one", "two"],
    ],
)
def test_bad_usage_ends_with_2_and_no_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown tool, too: it never starts a server by mistake."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: mlx-sidecar" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["probe", "inspect-cache"])
def test_no_server_is_said_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{name}: http://127.0.0.1:9 does not answer")
    assert len(said.splitlines()) == 1


def test_a_tool_runs_as_a_process_of_its_own(app: App) -> None:
    """`python -m sidecar TOOL` against a server, its exit code passed on."""
    ended = cli("inspect-cache", "--url", app.url, "--check")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "problems: 0" in ended.stdout
    refused = cli("diff-turns", "/nonexistent.log")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
