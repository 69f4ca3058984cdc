"""
`litellm-mlx service`: has the servers started at login, and again when they fail.

    litellm-mlx service install | uninstall | status | logs

A LaunchAgent on macOS, a user's unit of systemd on Linux. Settings are read from
`.env`; no key stands in the file.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from litellm_mlx.launcher.running import running_launchers
from litellm_mlx.launcher.service.launch_agent import LaunchAgent
from litellm_mlx.launcher.service.program import MARK, Program, ServiceManager
from litellm_mlx.launcher.service.systemd_unit import SystemdUnit
from litellm_mlx.launcher.settings import LaunchSettings, verb_settings
from litellm_mlx.launcher.whole_files import replace_file

_COMMAND_S, _POLL_S = 60.0, 0.5
_GRACE_S = 10


class Refused(Exception):
    """Nothing was done; the message says why, and what would help."""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, or it runs; 1 refused, or it does not; 2 bad usage."""
    parser = argparse.ArgumentParser(
        prog="litellm-mlx service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", choices=["install", "uninstall", "status", "logs"])
    parser.add_argument("--print", action="store_true", help="print the file only")
    parser.add_argument("-n", type=int, default=50, help="lines of logs (50)")
    parser.add_argument("-f", action="store_true", help="go on with logs")
    options = parser.parse_args(argv)
    settings = verb_settings()
    try:
        if options.do == "logs":
            return _logs(settings.servers_log, options.n, goes_on=options.f)
        manager = _manager()
        if options.do == "status":
            return _status(manager)
        if options.do == "uninstall":
            return _uninstall(manager)
        return _install(manager, settings, is_printed_only=options.print)
    except (Refused, OSError) as error:
        sys.stderr.write(f"litellm-mlx service: {error}\n")
        return 1


def _manager() -> ServiceManager:
    """This system's."""
    home = Path.home()
    if sys.platform == "darwin":
        return LaunchAgent(home)
    if sys.platform == "linux":
        named = os.environ.get("XDG_CONFIG_HOME")  # noqa: TID251 - no setting of ours
        return SystemdUnit(Path(named or home / ".config"))
    raise Refused(
        f"no service manager of {sys.platform} is known: macOS and Linux only"
    )


def _install(
    manager: ServiceManager, settings: LaunchSettings, *, is_printed_only: bool
) -> int:
    program = Program(
        (sys.executable, "-m", "litellm_mlx.launcher"),
        settings.env_path.resolve().parent,
        settings.servers_log.with_name("service.log"),
        int(settings.drain_timeout_s) + _GRACE_S,
    )
    words = (*program.arguments, str(program.folder), str(program.output))
    if any(character < " " for word in words for character in word):
        raise Refused("a folder with a control character in its name cannot be started")
    text, before = manager.text(program), _ours(manager.path)
    sys.stdout.write(f"{manager.path}:\n{text.decode()}\n")
    if is_printed_only:
        return 0
    pids = [] if before else running_launchers(settings)
    if pids:
        pid = pids[0]
        raise Refused(f"the servers run already (pid {pid}): `litellm-mlx stop` first")
    program.output.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if before:
        _run(manager.stop(), must_succeed=False)
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(manager.path, text, 0o644)
    try:
        _run(manager.start())
    except BaseException:
        _put_back(manager, before)
        raise
    sys.stdout.write("It runs, and will at each login. `litellm-mlx service status`\n")
    if manager.advice:
        sys.stdout.write(f"{manager.advice}\n")
    return 0


def _uninstall(manager: ServiceManager) -> int:
    if _ours(manager.path) is None:
        raise Refused(f"nothing is installed: there is no {manager.path}")
    fault = _run(manager.stop(), must_succeed=False)
    manager.path.unlink()
    _run(manager.removed(), must_succeed=False)
    sys.stdout.write(f"{manager.path} is gone. Downloads, caches and .env stay.\n")
    if fault:
        sys.stderr.write(f"It may run still: {fault}. `litellm-mlx stop`\n")
    return int(bool(fault))


def _status(manager: ServiceManager) -> int:
    if _ours(manager.path) is None:
        sys.stdout.write(f"not installed: there is no {manager.path}\n")
        return 1
    sys.stdout.write(f"installed: {manager.path}\n")
    sys.stdout.flush()
    return int(_call(manager.status()).returncode != 0)


def _ours(path: Path) -> bytes | None:
    """
    The file, if there is one.

    Raises:
        Refused: it is not ours.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    if MARK.encode() not in text:
        raise Refused(f"{path} was not written by this command; move it away first")
    return text


def _put_back(manager: ServiceManager, before: bytes | None) -> None:
    if before is None:
        _run(manager.stop(), must_succeed=False)
        manager.path.unlink()
        _run(manager.removed(), must_succeed=False)
    else:
        replace_file(manager.path, before, 0o644)
        _run(manager.start(), must_succeed=False)


def _run(commands: Sequence[list[str]], *, must_succeed: bool = True) -> str:
    """
    Run commands in order; why the first failed that did, else "".

    Raises:
        Refused: one of them failed that must not.
    """
    faults = []
    for command in commands:
        fault = _fault(command)
        if fault and must_succeed:
            raise Refused(fault)
        faults += [fault] if fault else []
    return faults[0] if faults else ""


def _fault(command: list[str]) -> str:
    """Run a command; why it failed, "" if it did not."""
    try:
        done = _call(command, is_quiet=True)
    except Refused as error:
        return str(error)
    if not done.returncode:
        return ""
    why = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
    return f"`{' '.join(command)}` failed: {why[0]}"


def _call(
    command: list[str], *, is_quiet: bool = False
) -> "subprocess.CompletedProcess[str]":
    """
    Run one command.

    Raises:
        Refused: there is no such program, or it does not end.
    """
    try:
        return subprocess.run(
            command,
            capture_output=is_quiet,
            text=True,
            timeout=_COMMAND_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise Refused(f"there is no {command[0]} on this machine") from None
    except OSError as error:
        raise Refused(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Refused(f"`{' '.join(command)}` takes over {_COMMAND_S:g} s") from None


def _logs(path: Path, num_lines: int, *, goes_on: bool) -> int:
    """The last lines of both servers, and those that come."""
    if not path.exists():
        raise Refused(f"there is no {path}: the servers have never run")
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
        sys.stdout.writelines(lines[max(len(lines) - num_lines, 0) :])
        with contextlib.suppress(KeyboardInterrupt):
            while goes_on and not _is_replaced(file, path):
                sys.stdout.flush()
                time.sleep(_POLL_S)
                sys.stdout.writelines(file.readlines())
            return _logs(path, sys.maxsize, goes_on=True) if goes_on else 0
    return 0


def _is_replaced(file: TextIO, path: Path) -> bool:
    """Whether another file stands there by now, as behind 10 MB."""
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
