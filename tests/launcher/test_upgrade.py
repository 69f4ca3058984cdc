"""`litellm-mlx upgrade` on a small checkout with a remote of its own, by real git."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.launcher import Launcher
from testkit.raw_http import eventually

REPO = Path(__file__).parents[2]
# Stand-ins of the set-up and of the self-test: each says that it ran, and the code that
# its file holds.
INSTALLER = """
import pathlib, sys
print("set up", flush=True)
sys.exit(int(pathlib.Path(__file__).with_name("check-code").read_text()))
"""
SELF_TEST = """
import pathlib, sys
print("tested", sys.argv[1:], flush=True)
sys.exit(int(pathlib.Path(__file__).parents[1].joinpath("test-code").read_text()))
"""


NEWEST = "this is the newest"
# A set-up that waits until it is ended.
WAITS = """
import pathlib, sys, time
pathlib.Path(__file__).with_name("began").touch()
time.sleep(float(pathlib.Path(__file__).with_name("wait").read_text()))
"""


class Project:
    """A checkout, and the repository that it follows."""

    def __init__(self, folder: Path) -> None:
        self.home, self.origin, self.root = folder, folder / "origin", folder / "here"
        shutil.copytree(
            REPO / "litellm_mlx", self.origin / "litellm_mlx",
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip
        (self.origin / "sidecar").mkdir()
        (self.origin / "sidecar" / "__main__.py").write_text(SELF_TEST)
        (self.origin / "install_and_run.py").write_text(INSTALLER)
        (self.origin / ".gitignore").write_text("__pycache__/\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.publish("the first")
        self.git("clone", "--quiet", str(self.origin), str(self.root), cwd=folder)

    def git(self, *words: str, cwd: Path | None = None) -> str:
        named = ("-c", "user.name=n", "-c", "user.email=e@localhost")
        done = subprocess.run(
            ["git", *named, *words], cwd=cwd or self.origin, check=True,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.stdout.strip()

    def publish(self, subject: str, *, check: int = 0, test: int = 0) -> None:
        """A commit at the remote whose check and self-test end with these codes."""
        (self.origin / "version").write_text(subject)
        (self.origin / "check-code").write_text(str(check))
        (self.origin / "test-code").write_text(str(test))
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", subject)

    @property
    def version(self) -> str:
        """Which commit the checkout has, as a file of it says."""
        return (self.root / "version").read_text()

    command = (sys.executable, "-m", "litellm_mlx.launcher", "upgrade")

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(self.root),
            "HOME": str(self.home), "MLX_CACHE_HOME": str(self.home / "cache"),
        }  # fmt: skip

    def upgrade(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.command, *words], cwd="/", env={**self.environ, **env},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def end_in_the_middle(self, signum: int) -> tuple[int, str]:
        """Send a signal to an upgrade in its set-up: its code, what it complained."""
        process = subprocess.Popen(
            self.command, cwd="/", env=self.environ, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert eventually((self.root / "began").exists, 60)
            os.killpg(process.pid, signum)
            _, said = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
        return process.returncode, said


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_clean_checkout_goes_forward(project: Project) -> None:
    """It is set up and tested; what git does not know stays."""
    (project.root / ".env").write_text("MODEL_PATH=built-in\n")
    project.publish("the second")
    project.publish("the third")
    done = project.upgrade()
    assert done.returncode == 0, done.stderr
    assert project.version == "the third"
    assert done.stdout.startswith("asking for what origin/main has ...\n2 new:\n")
    assert done.stdout.index("set up") < done.stdout.index("tested ['selftest']")
    assert done.stdout.splitlines()[-1].startswith("upgraded to ")
    assert (project.root / ".env").read_text() == "MODEL_PATH=built-in\n"
    again = project.upgrade()
    assert (again.returncode, again.stdout.splitlines()[1:]) == (0, [NEWEST])


def test_a_look_changes_nothing(project: Project) -> None:
    """--check says what there is."""
    for number in range(12):
        project.publish(f"number {number}")
    done = project.upgrade("--check")
    assert done.returncode == 0
    assert (done.stdout.count("number "), project.version) == (10, "the first")
    assert "12 new:\n" in done.stdout
    assert done.stdout.endswith("  and 2 more\n")


@pytest.mark.parametrize("codes", [{"check": 1}, {"test": 1}], ids=["check", "test"])
def test_what_does_not_work_is_taken_back(
    project: Project, codes: dict[str, int]
) -> None:
    """With the packages of the commit before, which is tried again."""
    project.publish("the broken", **codes)
    done = project.upgrade()
    assert done.returncode == 1
    assert project.version == "the first"
    assert done.stdout.count("set up") == 2
    assert "is back at" in done.stderr
    assert done.stderr.endswith("and that works\n")
    assert project.git("status", "--porcelain", cwd=project.root) == ""


def test_what_does_not_work_before_and_after_is_said(project: Project) -> None:
    """A full disk, say, which no commit mends."""
    project.git("reset", "--hard", "--quiet", "HEAD", cwd=project.root)
    project.publish("the broken", check=1)
    project.git("pull", "--quiet", cwd=project.root)
    project.publish("the next", check=1)
    done = project.upgrade()
    assert (done.returncode, project.version) == (1, "the broken")
    assert "does not pass its own now" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_is_broken_off_is_taken_back(project: Project, signum: int) -> None:
    """Else the next run would call newest what nobody has tried."""
    (project.origin / "install_and_run.py").write_text(WAITS)
    (project.origin / "wait").write_text("600")
    project.publish("the slow")
    code, said = project.end_in_the_middle(signum)
    assert (code, project.version) == (130, "the first")
    assert said.endswith("broken off; nothing is changed\n")
    assert "Traceback" not in said.rpartition("litellm-mlx upgrade")[2]


def test_what_was_killed_is_taken_back_by_the_next(project: Project) -> None:
    """And then it goes forward, if that works now."""
    (project.origin / "install_and_run.py").write_text(WAITS)
    (project.origin / "wait").write_text("600")
    project.publish("the slow")
    project.end_in_the_middle(signal.SIGKILL)
    assert project.version == "the slow"
    project.upgrade("--check")
    assert project.version == "the slow"  # who looks changes nothing
    (project.origin / "wait").write_text("0")
    project.publish("the quick")
    done = project.upgrade()
    assert done.returncode == 0, done.stderr
    assert "going back to" in done.stdout
    assert "2 new:" in done.stdout
    assert project.version == "the quick"


@pytest.mark.parametrize("is_committed", [True, False])
def test_what_was_done_by_hand_after_a_kill_stays(
    project: Project, *, is_committed: bool
) -> None:
    """A commit, or a file: the next upgrade throws neither away."""
    (project.origin / "install_and_run.py").write_text(WAITS)
    (project.origin / "wait").write_text("600")
    project.publish("the slow")
    project.end_in_the_middle(signal.SIGKILL)
    (project.root / "version").write_text("mine")
    if is_committed:
        project.git("commit", "--all", "--quiet", "-m", "my own", cwd=project.root)
    for _ in range(2):
        done = project.upgrade()
        assert (done.returncode, project.version) == (1, "mine")
        assert ("my own" if is_committed else "changed by hand") in done.stderr


def test_what_a_set_up_writes_into_the_checkout_is_taken_back(
    project: Project,
) -> None:
    """A file that git knows, and a code that is not 0."""
    written = "pathlib.Path('version').write_text('x'); sys.exit"
    text = INSTALLER.replace("sys.exit", written)
    (project.origin / "install_and_run.py").write_text(text)
    project.publish("the broken", check=1)
    done = project.upgrade()
    assert (done.returncode, project.version) == (1, "the first")
    assert "is back at" in done.stderr


def test_a_file_in_the_way_is_named_before_anything_ends(project: Project) -> None:
    """It would be overwritten; a hook's GIT_DIR names no other repository."""
    (project.root / "ü ber").write_text("mine")
    (project.origin / "ü ber").write_text("theirs")
    project.publish("the second")
    done = project.upgrade(GIT_DIR="/nowhere")
    assert (done.returncode, project.version) == (1, "the first")
    assert "ü ber" in done.stderr
    assert "stopping" not in done.stdout
    assert (project.root / "ü ber").read_text() == "mine"


def test_files_that_were_changed_by_hand_stay(project: Project) -> None:
    """They are named, and nothing is done."""
    (project.root / "version").write_text("mine")
    project.publish("the second")
    for words in ([], ["--check"]):
        done = project.upgrade(*words)
        assert (done.returncode, project.version) == (1, "mine")
        assert "changed by hand:\n  version\n" in done.stderr


def test_own_commits_stay(project: Project) -> None:
    """Nothing is merged or thrown away."""
    (project.root / "mine").touch()
    project.git("add", "mine", cwd=project.root)
    project.git("commit", "--quiet", "--message", "my own", cwd=project.root)
    project.publish("the second")
    done = project.upgrade()
    assert (done.returncode, project.version) == (1, "the first")
    assert "origin/main does not have, the last one" in done.stderr
    assert done.stderr.endswith("my own\n")


def test_a_branch_without_a_remote_is_said(project: Project) -> None:
    project.git("switch", "--quiet", "--create", "mine", cwd=project.root)
    done = project.upgrade()
    assert done.returncode == 1
    assert "git switch main" in done.stderr


def test_a_remote_that_is_away_is_said(project: Project) -> None:
    """In git's own words."""
    project.origin.rename(project.home / "away")
    done = project.upgrade()
    assert (done.returncode, project.version) == (1, "the first")
    assert done.stderr.startswith("litellm-mlx upgrade: git fetch: ")
    assert "does not appear to be a git repository" in done.stderr


def test_what_was_installed_is_upgraded_elsewhere(project: Project) -> None:
    """From a package index, or a folder that was unpacked."""
    shutil.rmtree(project.root / ".git")
    done = project.upgrade()
    assert done.returncode == 1
    assert "pip install --upgrade litellm-mlx" in done.stderr


def test_running_servers_end_first(project: Project, tmp_path: Path) -> None:
    """As `stop` ends them, on whatever port; with nothing to do they go on."""
    launcher = Launcher(tmp_path, "--no-proxy")
    try:
        launcher.wait_for("Ready.")
        assert NEWEST in project.upgrade().stdout
        assert launcher.process.poll() is None
        project.publish("the second")
        done = project.upgrade()
        assert done.returncode == 0, done.stderr
        assert launcher.process.wait(60) == 0
        assert "start them again" in done.stdout
    finally:
        if launcher.process.poll() is None:
            launcher.process.send_signal(signal.SIGKILL)
        launcher.wait()
