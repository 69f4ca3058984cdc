"""
`litellm-mlx upgrade [--check]`: takes a checkout to the newest commit of its branch.

Only forward, and only where no file was changed by hand. The new one has to set itself
up, pass its check and the self-test of your model; else the checkout goes back to the
commit that it was at, with that one's packages. Models, caches and `.env` stay.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from litellm_mlx.launcher.settings import PACKAGE_PARENT, LaunchSettings, verb_settings
from litellm_mlx.launcher.stop import stop_running

_GIT_S = 120.0  # a line that says nothing for so long says nothing more
_SHOWN = 10
_BROKEN_OFF = 130


class UpgradeFailed(Exception):
    """Why nothing was done; in words for the person who asked."""


class Checkout:
    """
    A git checkout of this project.

    Raises:
        UpgradeFailed: the folder is none.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / ".git").exists():
            raise UpgradeFailed(
                f"{root} is no git checkout; what was installed from a package index "
                "is upgraded there: pip install --upgrade litellm-mlx"
            )

    def git(self, *arguments: str) -> str:
        """
        What a git command says.

        Raises:
            UpgradeFailed: it failed; in git's words.
        """
        # A hook's GIT_DIR would name another repository.
        own = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # noqa: TID251
        # Nobody is there to type a password, and no message is translated.
        quiet = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        command = ["git", "-c", "core.quotePath=false", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env={**own, **quiet},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_GIT_S,
            )
        except FileNotFoundError:
            raise UpgradeFailed("git is not on PATH: install it") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UpgradeFailed(f"git {arguments[0]}: {error}") from None
        if done.returncode:
            said = done.stderr.strip() or "it failed"
            raise UpgradeFailed(f"git {arguments[0]}: {said}")
        return done.stdout.strip()

    @property
    def mark(self) -> Path:
        """A file that stands while an upgrade goes on: from which commit, and to."""
        return self.root / self.git("rev-parse", "--git-path", "litellm-mlx-upgrade")

    def check_unchanged(self) -> None:
        """
        See that no file was changed by hand.

        Raises:
            UpgradeFailed: with their names.
        """
        if changed := self.git("diff", "--name-only", "HEAD").splitlines():
            names = "".join(f"\n  {name}" for name in changed)
            raise UpgradeFailed(f"these files were changed by hand:{names}")

    def commits_to_come(self) -> list[str]:
        """
        What its branch has beyond it, the newest first; its remote is asked.

        Raises:
            UpgradeFailed: it cannot only go forward.
        """
        try:
            upstream = self.git("rev-parse", "--abbrev-ref", "@{upstream}")
        except UpgradeFailed:
            raise UpgradeFailed(
                "the branch at hand follows none of a remote: git switch main"
            ) from None
        _say(f"asking for what {upstream} has ...")
        self.git("fetch", "--quiet")
        if own := self.git("log", "--format=%h %s", "@{upstream}..HEAD").splitlines():
            raise UpgradeFailed(
                f"the checkout has commits that {upstream} does not have, the last one "
                f"{own[0]}"
            )
        return self.git("log", "--format=%h %s", "HEAD..@{upstream}").splitlines()

    def check_way(self) -> None:
        """
        See that going forward would overwrite nothing.

        Raises:
            UpgradeFailed: a file that git does not know is in the way.
        """
        self.git("read-tree", "--dry-run", "-m", "-u", "HEAD", "@{upstream}")

    def is_good(self) -> bool:
        """Whether it sets itself up, passes its check and its model's self-test."""
        environ = {**os.environ, "PYTHONPATH": str(self.root)}  # noqa: TID251 - as above
        check = [sys.executable, str(self.root / "install_and_run.py"), "--check"]
        test = [sys.executable, "-m", "sidecar", "selftest"]
        return all(
            subprocess.run(command, cwd=self.root, env=environ, check=False).returncode
            == 0
            for command in (check, test)
        )


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 it is the newest, 1 it is not, and why, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="litellm-mlx upgrade", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what there is")
    options = parser.parse_args(argv)
    settings = verb_settings()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it goes back as well
    are_stopped = False
    try:
        checkout = Checkout(PACKAGE_PARENT)
        checkout.check_unchanged()
        if not options.check:
            _go_back_from_a_broken_one(checkout)
        if not _say_what_comes(checkout) or options.check:
            return 0
        checkout.check_way()
        are_stopped = _stop(settings)
        upgrade(checkout, checkout.is_good)
    except UpgradeFailed as error:
        sys.stderr.write(f"litellm-mlx upgrade: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("litellm-mlx upgrade: broken off; nothing is changed\n")
        return _BROKEN_OFF
    finally:
        if are_stopped:
            _say("the servers were stopped: start them again")
    _say(f"upgraded to {checkout.git('rev-parse', '--short', 'HEAD')}")
    return 0


def upgrade(checkout: Checkout, is_good: Callable[[], bool]) -> None:
    """
    Go forward, and back again if what came is not good, or it is broken off.

    Raises:
        UpgradeFailed: it is back where it was.
    """
    before, after = checkout.git("rev-parse", "HEAD", "@{upstream}").split()
    mark = checkout.mark
    mark.write_text(f"{before} {after}")
    try:
        checkout.git("merge", "--ff-only", "--quiet", "@{upstream}")
        if is_good():
            mark.unlink()
            return
    except BaseException:
        _go_back(checkout, before)
        raise
    _go_back(checkout, before)
    why = f"{after[:7]} did not pass its check: the checkout is back at {before[:7]}"
    if not is_good():
        raise UpgradeFailed(f"{why}, which does not pass its own now; see above")
    raise UpgradeFailed(f"{why}, and that works")


def _go_back(checkout: Checkout, commit: str) -> None:
    """Be at a commit again; nothing had been changed by hand."""
    checkout.git("reset", "--hard", "--quiet", commit)
    checkout.mark.unlink(missing_ok=True)


def _go_back_from_a_broken_one(checkout: Checkout) -> None:
    """
    After an upgrade that was killed: nobody has tried what is there.

    Where somebody has gone on by hand since, what is there is theirs, and stays.
    """
    mark = checkout.mark
    if not mark.exists():
        return
    before, _, after = mark.read_text().partition(" ")
    if after == checkout.git("rev-parse", "HEAD"):
        _say(f"an upgrade was broken off: going back to {before[:7]} first")
        _go_back(checkout, before)
    mark.unlink(missing_ok=True)


def _say_what_comes(checkout: Checkout) -> bool:
    """Say which commits there are; False: none."""
    commits = checkout.commits_to_come()
    if not commits:
        _say("this is the newest")
        return False
    more = len(commits) - _SHOWN
    shown = [*commits[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    _say(f"{len(commits)} new:", *(f"  {line}" for line in shown))
    return True


def _stop(settings: LaunchSettings) -> bool:
    """
    Let what runs end: a server imports its files as it needs them.

    Raises:
        UpgradeFailed: something of it does not end.
    """
    code = stop_running(settings, on_any_port=True)
    if code:
        raise UpgradeFailed("a server does not end: see above")
    return code is not None


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
