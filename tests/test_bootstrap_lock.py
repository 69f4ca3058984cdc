"""Which releases `install_and_run.py` installs: real uv and pip, wheels made here."""

import os
import re
import signal
import subprocess
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from testkit.bootstrap import BASE, Project, load_script, make_script

REPO = Path(__file__).parents[1]
LOCKS = sorted((REPO / "requirements").glob("*.txt"))
PLATFORMS = [("darwin", "arm64"), ("linux", "x86_64"), ("linux", "aarch64")]

script = load_script()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose tested release is not the newest; the first start was made."""
    one = locked(Project(tmp_path_factory.mktemp("a project").resolve()))
    one.lock("uv", "uv==99", one.add_uv())
    first = one.run()
    assert "with uv" in first.out, first.error
    assert first.code == 3, first.error
    return one


def locked(one: Project) -> Project:
    """Release 1 was tested, 2 is there."""
    tested = one.add_wheel("needed", "1", {"needed.py": "VERSION = 1"})
    # Of another length: Python takes compiled code by a file's length and second.
    one.add_wheel("needed", "2", {"needed.py": "VERSION = 2  # the newest"})
    one.lock("base", "needed==1", tested)
    one.lock("uv", "", "")
    for extra in ("cpu", "dev"):
        one.lock(extra, "", "")
    return one


def test_what_was_tested_is_installed(project: Project) -> None:
    """By default; `--latest` takes the newest, and the next plain start goes back."""
    assert (project.root / ".venv" / "bin" / "uv").exists()
    assert project.version_of_needed() == "1"
    assert project.run("--latest").code == 3
    assert project.version_of_needed() == "2"
    assert project.run().has_installed
    assert project.version_of_needed() == "1"
    assert not project.run().has_installed


def test_an_install_that_was_stopped_is_made_whole(project: Project) -> None:
    """What a killed uv was just writing it would take for installed the next time."""
    project.run()
    uv = project.root / ".venv" / "bin" / "uv"
    (written,) = project.root.glob(".venv/lib/python3*/site-packages/needed.py")
    good = uv.read_text()
    stops = f"[ $1 = --version ] && echo uv 99 && exit; rm '{written}'; exec sleep 60"
    make_script(uv, stops)
    project.change()
    process = subprocess.Popen(
        project.command(), cwd=project.root, env=project.environment()
    )
    with process:
        while written.exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    uv.write_text(good)
    assert project.run().has_installed
    assert project.version_of_needed() == "1"


def test_a_stop_before_its_output_is_read_ends_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C between the command's start and the reader's left it running."""
    written = tmp_path / "pid"

    class Interrupted(threading.Thread):
        def start(self) -> None:
            while not (written.exists() and written.read_text().endswith("\n")):
                time.sleep(0.01)
            raise KeyboardInterrupt

    # Only the script's: servers of other tests start threads in this process.
    monkeypatch.setattr(script, "threading", SimpleNamespace(Thread=Interrupted))
    with pytest.raises(KeyboardInterrupt):
        script.run_quietly(["sh", "-c", f"echo $$ >'{written}'; exec sleep 300"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


def test_a_release_that_the_index_does_not_have(project: Project) -> None:
    """One line, and the newest that fits: a lock alone stops no first start."""
    lock = project.root / "requirements" / "base.txt"
    good = lock.read_text()
    project.lock("base", "needed==3", "0" * 64)
    result = project.run()
    assert result.code == 3, result.error
    said = "cannot be had here (needed==3 is missing): installing the newest that fit"
    assert said in result.out
    assert project.version_of_needed() == "2"
    assert not project.run().has_installed
    lock.write_text(good)
    project.run()
    assert project.version_of_needed() == "1"


def test_a_file_that_is_not_the_tested_one_is_refused(project: Project) -> None:
    """That is no release that is lacking: somebody may have put it there."""
    lock = project.root / "requirements" / "base.txt"
    good = lock.read_text()
    project.lock("base", "needed==2", "0" * 64)
    result = project.run()
    lock.write_text(good)
    assert result.code == 1
    assert "another file than the one that was tested" in result.error
    assert "ECHO" not in result.out


def test_pip_goes_on_where_uv_cannot_be_had(tmp_path: Path) -> None:
    """It installs the tested releases too."""
    alone = locked(Project(tmp_path))
    result = alone.run()
    assert "uv cannot be had here: pip goes on alone" in result.out
    assert "with pip" in result.out
    assert result.code == 3, result.error
    assert alone.version_of_needed() == "1"


def test_a_packages_code_is_compiled_at_the_first_start(project: Project) -> None:
    """By what imports it, as uv does not: also where nothing is to be written."""
    launcher = project.root / "litellm_mlx" / "launcher.py"
    good = launcher.read_text()
    launcher.write_text("import needed\n" + good)
    project.change()
    assert project.run(PYTHONDONTWRITEBYTECODE="1").has_installed
    launcher.write_text(good)
    compiled = ".venv/lib/python3*/site-packages/__pycache__/needed.*.pyc"
    assert list(project.root.glob(compiled))


def test_uv_is_told_what_pip_is_configured_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not read pip's files and variables; a variable beats a file."""
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = http://one/simple\ntimeout = 9\n"
        "extra-index-url =\n    file:///a\n    file:///b\n"
        "[install]\nfind-links = /x /y\n"
    )
    for name in ("PIP_FIND_LINKS", "PIP_DEFAULT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "http://two/simple")
    settings = script.uv_settings([BASE, "-m", "pip"])
    assert settings["UV_DEFAULT_INDEX"] == "http://two/simple"
    # The main index first: uv takes the files of one release from one index alone.
    assert settings["UV_INDEX"] == "http://two/simple file:///a file:///b"
    assert settings["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert settings["UV_FIND_LINKS"] == "/x,/y"
    assert settings["UV_HTTP_TIMEOUT"] == "9"


# The lock itself.


def pinned(name: str) -> list[Requirement]:
    """What a file of requirements/ has."""
    text = (REPO / "requirements" / f"{name}.txt").read_text()
    lines = re.findall(r"^\w.*?(?= \\$)", text, re.MULTILINE)
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_release_has_hashes_and_no_place(path: Path) -> None:
    """Where it comes from is the user's configuration alone."""
    text = path.read_text()
    blocks = re.findall(r"^\w.*\n(?: .*\n)*", text, re.MULTILINE)
    assert blocks
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in text
    assert not re.search(r"^ *--(?!hash)", text, re.MULTILINE)


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
@pytest.mark.parametrize(("system", "machine"), PLATFORMS)
def test_the_lock_is_of_what_pyproject_asks_for(
    system: str, machine: str, python: str
) -> None:
    """One release of each on each platform and Python; else: lock_dependencies."""
    here = {
        "sys_platform": system,
        "platform_system": system.capitalize(),
        "platform_machine": machine,
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
    }

    def found(group: str) -> set[tuple[str, str]]:
        return {
            (one.name.lower().replace("_", "-"), str(one.specifier).removeprefix("=="))
            for one in pinned(group)
            if one.marker is None or one.marker.evaluate(here)
        }

    asked = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    groups = {**asked["optional-dependencies"], "base": asked["dependencies"]}
    for group, lines in groups.items():
        versions = dict(found("base") | found(group))
        for wanted in map(Requirement, lines):
            version = versions[wanted.name.lower().replace("_", "-")]
            assert wanted.specifier.contains(version), (group, wanted)
    everything = set().union(*map(found, groups))
    assert len(dict(everything)) == len(everything)
