"""`install_and_run.py`: real venvs, a real broken shim, real pip, no network."""

import ast
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from testkit.bootstrap import (
    BACKEND,
    BASE,
    PYPROJECT,
    SCRIPT,
    Project,
    load_script,
    make_script,
)

REPO = Path(__file__).parents[1]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "3.11" if VERSION != "3.11" else "3.12"

script = load_script()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose first start has been made."""
    one = Project(tmp_path_factory.mktemp("a project").resolve())
    first = one.run("--port", "1234", "--no-proxy")
    assert "Creating .venv with" in first.out, first.error
    assert first.has_installed
    assert first.code == 3, first.error
    return one


# The whole way.


def test_the_second_start_installs_nothing(project: Project) -> None:
    """With all in place it goes straight to the launcher."""
    second = project.run()
    assert not second.has_installed
    assert "Creating" not in second.out
    assert "ECHO litellm_mlx.launcher" in second.out


def test_the_launcher_runs_in_the_venv_and_the_root(
    project: Project, tmp_path: Path
) -> None:
    """Options are handed on, paths made absolute; its exit code is ours."""
    (tmp_path / "model").mkdir()
    options = "--model model --config mine.yaml --port 1 --proxy-port 2 --no-proxy"
    result = project.run(*options.split(), cwd=tmp_path)
    expected = [
        "--no-proxy", "--model", str(tmp_path / "model"), "--port", "1",
        "--proxy-port", "2", "--config", str(tmp_path / "mine.yaml"),
    ]  # fmt: skip
    where = f"{project.root} {project.root / '.venv'}"
    assert f"ECHO litellm_mlx.launcher {where} {expected}" in result.out
    assert result.code == 3


def test_a_hub_id_is_handed_on_as_it_is(project: Project) -> None:
    """A model that is no folder here is not made a path."""
    assert "['--model', 'org/name']" in project.run("--model", "org/name").out


def test_a_tilde_in_a_path_is_the_home_folder(project: Project, tmp_path: Path) -> None:
    """A shell leaves that of --config=~/mine.yaml to the program."""
    out = project.run("--config=~/mine.yaml", cwd=tmp_path).out
    assert f"['--config', '{project.root / 'home/mine.yaml'}']" in out


def test_env_is_made_from_the_example(project: Project) -> None:
    """`.env` is there after the first start, for the user's eyes only."""
    env_file = project.root / ".env"
    assert env_file.read_text() == "# MODEL_PATH=\n"
    assert env_file.stat().st_mode & 0o077 == 0


def test_tests_are_run_with_the_dev_extra(project: Project) -> None:
    """`test` adds what tests need, hands its arguments to pytest and ends as it did."""
    result = project.run("test", "-x", "-k", "some name")
    assert result.has_installed
    (extras,) = re.findall(r"Installing \.\[(.*?)\]", result.out)
    assert "dev" in extras.split(",")
    assert f"ECHO pytest.__main__ {project.root}" in result.out
    assert "['-x', '-k', 'some name']" in result.out
    assert result.code == 3
    # More than is asked for is there now: nothing to do for either command.
    assert not project.run().has_installed
    assert not project.run("test").has_installed


def test_a_changed_pyproject_is_installed_again(project: Project) -> None:
    """A failed install says why and is tried again; a good one is not repeated."""
    good = PYPROJECT + "# changed\n"
    (project.root / "pyproject.toml").write_text(good.replace('"backend"', '"absent"'))
    for _ in range(2):
        failed = project.run()
        assert failed.has_installed
        assert failed.code == 1
        assert "absent" in failed.error
        assert "ECHO" not in failed.out
    (project.root / "pyproject.toml").write_text(good)
    assert project.run().has_installed
    assert not project.run().has_installed


def test_signals_reach_the_launcher(project: Project) -> None:
    """There is no process in between that a signal could stop at."""
    process = subprocess.Popen(
        project.command("--model", "wait"),
        cwd=project.root,
        env=project.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        while "ECHO" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 17


def test_check_says_what_is_missing(project: Project) -> None:
    """Without MLX the check ends with 1, and names it."""
    result = project.run("--check")
    assert result.code == 1
    assert "MISSING: import mlx.core fails" in result.out
    assert f" in {project.root / '.venv'}" in result.out
    assert "does not answer" not in result.error


def test_check_tries_what_it_lists(project: Project) -> None:
    """With everything installed the servers may still not start: it ends with 1."""
    stand_in = project.root / "mlx"
    stand_in.mkdir()
    (stand_in / "core.py").write_text("def default_device(): return 'stand-in'")
    result = project.run("--check")
    shutil.rmtree(stand_in)
    assert "MLX runs on  stand-in" in result.out
    assert "does not answer" in result.error
    assert result.code == 1


@pytest.mark.parametrize(("platform", "is_said"), [("darwin", True), ("linux", False)])
def test_check_says_what_a_mac_keeps_wired(
    platform: str,
    *,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wiring more is what panics many Macs; elsewhere nothing is wired."""
    script = load_script()
    monkeypatch.setattr(script.sys, "platform", platform)
    monkeypatch.setenv("WIRED_LIMIT", "weights")
    script.report(script.Venv(tmp_path / "none"))
    assert ("wired        weights (WIRED_LIMIT)" in capsys.readouterr().out) == is_said


def test_ctrl_c_while_it_checks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As while it installs, not a traceback."""

    def interrupted(*_arguments: object) -> NoReturn:
        raise KeyboardInterrupt

    script = load_script()
    monkeypatch.setattr(script, "set_up", lambda *_: None)
    monkeypatch.setattr(script, "check", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert script.main(["--check"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "\ninstall_and_run: interrupted\n"


def test_a_venv_of_a_chosen_python_elsewhere(project: Project) -> None:
    """`--python` and `--venv`: made there, the usual one is left alone."""
    (project.root / "home" / ".pyenv").mkdir()
    place = project.root / "another venv"
    made = project.run("--check", "--python", VERSION, "--venv", "another venv")
    assert f"Creating another venv with {BASE}" in made.out, made.error
    assert f"python       {VERSION} in {place}" in made.out
    other = project.run("--check", "--python", OTHER, "--venv", "another venv")
    assert f"Python {VERSION}, needed {OTHER}" in other.error


def test_a_chosen_python_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A code of its own, so that a script can pass over a Python that is missing."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "candidates", lambda version: [])
    place = tmp_path / "none"
    code = script.main(["--check", "--python", OTHER, "--venv", str(place)])
    assert code == script.NO_SUCH_PYTHON
    assert f"no usable Python {OTHER}" in capsys.readouterr().err
    assert not place.exists()


def test_a_spoilt_venv_is_refused(project: Project) -> None:
    """A venv with parts of another Python is not touched; the fix is said."""
    alien = project.root / ".venv" / "bin" / "python3.7"
    alien.touch()
    result = project.run()
    alien.unlink()
    assert result.code == 1
    assert str(alien) in result.error
    # Quoted: pasted into a shell, "a project" must not be two folders.
    assert f"Fix: rm -rf '{project.root / '.venv'}'" in result.error
    assert "ECHO" not in result.out


def test_an_index_that_cannot_be_reached(project: Project) -> None:
    """Pip's twenty lines end in a version problem; the last line is the remedy."""
    needy = project.root / "needy"
    needy.mkdir()
    one = Project(needy)
    (needy / "pyproject.toml").write_text(PYPROJECT.replace("needed", "litellm"))
    backend = BACKEND.replace("Requires-Dist: needed", "Requires-Dist: litellm>=1")
    (needy / "backend.py").write_text(backend)
    index = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1"}
    result = one.run(**index, PIP_NO_INDEX="0")
    assert result.code == 1
    last = result.error.strip().splitlines()[-1]
    assert last.startswith("Fix: the package index cannot be reached: check")
    assert "HTTPS_PROXY" in last


def test_a_stop_during_the_launchers_imports_is_kept_for_it(project: Project) -> None:
    """It would be a traceback; pytest has a handler of its own from the start."""
    assert "KEPT BACK ['SIGINT']" in project.run("--no-proxy").out
    assert "KEPT BACK []" in project.run("test", "-q").out


# The interpreter.


def test_a_shim_that_does_not_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first candidate on PATH exists but fails; the next one is taken."""
    shims, real = tmp_path / "shims", tmp_path / "real"
    shims.mkdir()
    real.mkdir()
    make_script(shims / f"python{VERSION}", "echo 'command not found' >&2; exit 127")
    (real / f"python{VERSION}").symlink_to(BASE)
    monkeypatch.setenv("PATH", f"{shims}:{real}")
    path, tried = script.find_interpreter([VERSION])
    assert path == str(real / f"python{VERSION}")
    reason = "does not run (command not found)"
    assert tried == [f"{shims / f'python{VERSION}'}: {reason}"]


def test_the_newest_of_pyenvs_versions_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.12.10 is newer than 3.12.9, and 3.1 is no 3.12."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for name in ("3.12.9", "3.12.10", "3.1.2"):
        (tmp_path / "versions" / name / "bin").mkdir(parents=True)
        make_script(tmp_path / "versions" / name / "bin" / "python3.12", "")
    found = [path for path in script.candidates("3.12") if str(tmp_path) in path]
    assert [Path(path).parts[-3] for path in found] == ["3.12.10", "3.12.9"]


def test_a_python_of_another_version_does_not_count(tmp_path: Path) -> None:
    """What a candidate says of itself counts, not its name."""
    (tmp_path / "python3.99").symlink_to(BASE)
    fault = script.interpreter_fault(str(tmp_path / "python3.99"), "3.99")
    assert fault == f"is Python {VERSION}, not 3.99"


def test_without_any_python_it_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names each candidate, why it failed, and a way out."""
    make_script(tmp_path / "python3.99", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(script.NoPython) as caught:
        script.create_venv(script.Venv(tmp_path / "venv"), ["3.99"])
    assert f"tried {tmp_path / 'python3.99'}: does not run" in str(caught.value)
    assert "Fix: install Python 3.99" in str(caught.value)


# The venv.


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A venv folder in good order, with a pip script as pip writes it."""
    root = tmp_path / ".venv"
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(root)], check=True)
    write_pip(root, f"#!{root}/bin/python{VERSION}\n")
    return root


def write_pip(venv: Path, head: str) -> None:
    (venv / "bin" / "pip").write_text(f"{head}import pip\n")


def test_a_good_venv_is_accepted(venv: Path) -> None:
    """A venv in order has nothing to complain of."""
    assert script.contamination(venv) == []


def test_the_long_form_of_a_first_line_is_understood(venv: Path) -> None:
    """pip writes two lines where the path is long or has a blank in it."""
    python = f"{venv}/bin/python{VERSION}"
    write_pip(venv, f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n")
    assert script.contamination(venv) == []
    write_pip(venv, "#!/bin/sh\n'''exec' /else/where/bin/python \"$0\" \"$@\"\n' '''\n")
    (problem,) = script.contamination(venv)
    assert "/else/where/bin/python" in problem


@pytest.mark.parametrize("name", [f"bin/python{OTHER}", f"bin/pip{OTHER}"])
def test_files_of_another_python_are_named(venv: Path, name: str) -> None:
    """Commands of another minor version are artefacts."""
    (venv / name).touch()
    (problem,) = script.contamination(venv)
    assert problem.startswith(str(venv / name))


def test_a_library_of_another_python_is_named(venv: Path) -> None:
    """So is a second library folder."""
    (venv / "lib" / f"python{OTHER}").mkdir()
    (problem,) = script.contamination(venv)
    assert problem.startswith(str(venv / "lib" / f"python{OTHER}"))


@pytest.mark.parametrize("head", ["#!/usr/bin/python3\n", "#!/usr/bin/env python\n"])
def test_a_pip_of_another_python_is_named(venv: Path, head: str) -> None:
    """A pip that would install elsewhere, as after a move of the folder."""
    write_pip(venv, head)
    (problem,) = script.contamination(venv)
    assert problem.startswith(str(venv / "bin" / "pip"))


def test_a_python_that_is_gone_is_named(venv: Path) -> None:
    """A venv whose interpreter was removed cannot be used."""
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nowhere/python")
    (problem,) = script.contamination(venv)
    assert "bin/python: does not run" in problem


def test_a_venv_of_a_foreign_version_is_named(venv: Path) -> None:
    """The version a venv was made with must be one that is supported."""
    text = (venv / "pyvenv.cfg").read_text()
    (venv / "pyvenv.cfg").write_text(text.replace(f"= {VERSION}.", "= 3.8."))
    assert any("Python 3.8, needed 3.12" in one for one in script.contamination(venv))
    (venv / "pyvenv.cfg").unlink()
    (problem,) = script.contamination(venv)
    assert "pyvenv.cfg: missing" in problem


# What is installed, and how that is shown.


@pytest.mark.parametrize(
    ("arguments", "are_added"),
    [
        (["--model", "mlx-community/Qwen3-VL-4B-Instruct-4bit"], False),
        (["--full"], True),
        (["test"], True),
    ],
)
def test_the_packages_for_images_and_sound_are_asked_for(
    arguments: list[str], are_added: bool, tmp_path: Path
) -> None:
    """No model's name pulls a gigabyte; the tests leave nothing untried."""
    options, _ = script.parse_options(arguments)
    extras = script.wanted_extras(script.Venv(tmp_path), options, set())
    assert ({"vision", "audio"} <= extras) is are_added
    assert are_added or not {"vision", "audio"} & extras


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_command_shows_that_it_is_at_work() -> None:
    """On a terminal its last line and the seconds, in one line that is taken away."""
    screen = Terminal()
    talk = "import time; print('Downloading x', flush=True); time.sleep(1)"
    script.run_quietly([sys.executable, "-c", talk], script.LiveLine(screen))
    shown = screen.getvalue()
    assert "s  Downloading x" in shown
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K")


def test_without_a_terminal_it_says_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log is not filled, and not silent for minutes either."""
    log = io.StringIO()
    clock = iter(range(100, 200))
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=clock.__next__))
    live = script.LiveLine(log)
    for _ in range(25):
        live.show("Collecting y")
    live.clear()
    assert log.getvalue() == "  10 s  Collecting y\n  20 s  Collecting y\n"


def test_a_failed_command_is_told_with_its_last_lines() -> None:
    """The reason is at the end of what it said."""
    talk = "print('much'); raise SystemExit('the reason')"
    with pytest.raises(script.SetupError, match="the reason"):
        script.run_quietly([sys.executable, "-c", talk])


# The script itself.


def test_it_runs_on_python_3_9_with_the_standard_library() -> None:
    """It is the first thing to run: on old Pythons, before anything is installed."""
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 9))
    imported = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    tops = {str(name).partition(".")[0] for name in imported}
    assert tops <= sys.stdlib_module_names


def test_it_names_no_index_host() -> None:
    """Where packages come from is the user's pip or uv configuration alone."""
    assert "://" not in SCRIPT.read_text()


def test_help_fits_on_one_screen() -> None:
    """`--help` shows all there is within 40 lines of 80 characters."""
    result = subprocess.run(
        [BASE, str(SCRIPT), "--help"],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert all(
        word in result.stdout for word in ("test", "--check", "--full", "--cuda")
    )


def test_a_bad_option_is_bad_usage() -> None:
    """A mistyped option ends with code 2 before anything is set up."""
    result = subprocess.run(
        [BASE, str(SCRIPT), "--modle", "x"], capture_output=True, check=False
    )
    assert result.returncode == 2


# CI.

FAILED_CHECKS = "FAILED: a Python, see below"


@pytest.mark.parametrize(
    ("check", "fast", "rest", "code", "said"),
    [
        (
            0,
            0,
            0,
            0,
            ["Python 3.11: ok", "Python 3.13: ok", "Python 3.13 --latest: ok"],
        ),
        (0, 5, 0, 5, ["Python 3.13: ok"]),
        (0, 0, 5, 5, ["Python 3.13: ok"]),
        (1, 0, 0, 1, ["Python 3.11: FAILED (exit code 1)", FAILED_CHECKS]),
        (1, 5, 0, 1, [FAILED_CHECKS]),
        (script.NO_SUCH_PYTHON, 0, 0, 0, ["Python 3.11: not found, passed over"]),
    ],
)
def test_ci_fails_if_anything_fails(
    tmp_path: Path, check: int, fast: int, rest: int, code: int, said: list[str]
) -> None:
    """Both lanes, with their arguments, and the other Pythons beside the first."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPO / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / SCRIPT.name).write_text(
        "import sys\nprint('CALLED', sys.argv[1:])\n"
        f"lane = {rest} if '--rest' in sys.argv else {fast}\n"
        f"sys.exit(lane if sys.argv[1] == 'test' else {check})\n"
    )
    command = [str(tmp_path / ".ci" / "run"), "-k", "some name"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    calls = [line for line in ended.stdout.splitlines() if line.startswith("CALLED")]
    oldest, newest = (
        f"'--check', '--python', '{version}', '--venv', 'build/venv-{version}'"
        for version in ("3.11", "3.13")
    )
    assert calls == [
        "CALLED ['test', '-k', 'some name']",
        f"CALLED [{oldest}]",
        f"CALLED [{newest}]",
        f"CALLED [{newest}, '--latest']",
        "CALLED ['test', '--rest', '-k', 'some name']",
    ]
    assert all(line in ended.stdout for line in said)


def test_a_folder_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a sentence, and not with a traceback."""
    (tmp_path / ".env.example").write_text("")
    monkeypatch.setattr(script, "ROOT", tmp_path)

    def refused(*_: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "copyfile", refused)
    with pytest.raises(script.SetupError, match="cannot be written to") as caught:
        script.set_up(script.Venv(tmp_path / ".venv"), SimpleNamespace(python=None))
    assert "git clone" in str(caught.value)


def test_packages_of_another_python_are_left_outside(
    project: Project, tmp_path: Path
) -> None:
    """PYTHONPATH would put them before those of the venv."""
    (tmp_path / "litellm_mlx").mkdir()
    planted = tmp_path / "litellm_mlx" / "__init__.py"
    planted.write_text("raise SystemExit('PLANTED')")
    done = project.run(PYTHONPATH=str(tmp_path))
    assert "PLANTED" not in done.out + done.error
    assert "ECHO litellm_mlx.launcher" in done.out
