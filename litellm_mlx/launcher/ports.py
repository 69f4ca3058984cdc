"""
Who holds a port, and the pid files by which our own left-over servers are known.

A launcher that was killed leaves its servers behind. The next one may stop those,
and nothing else: a process counts as ours if our pid file names it or its command
line names our generated config.
"""

import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from litellm_mlx.launcher.settings import Address

logger = logging.getLogger(__name__)

_LISTEN = "0A"  # the state column of /proc/net/tcp
_POLL_S = 0.1
_CLOSE_WAIT_S = 5.0
_SHOWN_CHARS = 300
_RECORD_BYTES = 64  # of a pid file
_HAS_PROC = Path("/proc/net/tcp").exists()  # Linux; macOS asks lsof and ps


class PortHeld(Exception):
    """A port that we need cannot be had: a process has it that is not ours to stop."""


PROXY_MODULE = "litellm_mlx.proxy_process"
_MODULES = {"litellm": PROXY_MODULE}  # earlier versions ran LiteLLM's own command


@dataclass(frozen=True, slots=True)
class Holder:
    """The process listening on a port; pid is None if it is hidden from us."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        if self.pid is None:
            return "another process"
        command = " ".join(self.command.split())[:_SHOWN_CHARS]
        return f"pid {self.pid} ({command or 'command unknown'})"


class PidFile:
    """
    The pid of one server of ours, locked while its launcher lives.

    The server's pid, which changes when it is started again, and on a second line the
    launcher's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def lock(self) -> bool:
        """Take the lock, which ends with this process; False if another has it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.write(self.read())  # the launcher is another one now
        return True

    def is_locked(self) -> bool:
        """Whether a launcher that lives has the lock; who asks does not take it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def read(self) -> int | None:
        """The pid last written."""
        return self._pid_in(0)

    def launcher(self) -> int | None:
        """The pid of the launcher that holds the lock, or held it last."""
        return self._pid_in(1)

    def write(self, pid: int | None) -> None:
        """
        Replace the pid; None when the server has ended.

        The file keeps its size, so a full disk has room for it. Where there is none all
        the same, the pid before stays: servers go on without the file.
        """
        record = f"{pid or ''}\n{os.getpid()}\n".ljust(_RECORD_BYTES)
        try:
            os.pwrite(self._descriptor, record.encode(), 0)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path, error)

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._descriptor)

    def _pid_in(self, index: int) -> int | None:
        # A disk that was full may have left anything.
        lines = self.path.read_text("utf-8", errors="replace").split("\n")
        text = lines[index].strip() if index < len(lines) else ""
        return int(text) if text.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A port we want, and what marks a process that already has it as ours."""

    name: str
    address: Address
    pid_file: PidFile
    own_argument: str | None = None  # only ours have this in their command line

    def is_ours(self, holder: Holder) -> bool:
        """True if the process was started by a launcher with this run folder."""
        if self.own_argument is not None and self.own_argument in holder.command:
            return True
        # A pid may have passed to a stranger since: the name must fit as well.
        # As a word of its own: a checkout's folder may well be called litellm-mlx.
        words = {Path(word).name for word in holder.command.split()}
        names = {self.name, _MODULES.get(self.name, self.name)}
        return holder.pid == self.pid_file.read() and not words.isdisjoint(names)


def claim_port(claim: Claim, *, term_wait_s: float = 10.0) -> int | None:
    """
    Make sure the port is free, stopping a left-over server of ours if need be.

    Returns:
        The pid of the server that was stopped, or None.
    Raises:
        PortHeld: the port belongs to something else; the message names it.
    """
    if not claim.pid_file.lock():
        # Its server would be started again: only the launcher can be stopped.
        launcher = claim.pid_file.launcher()
        raise PortHeld(
            f"another litellm-mlx is running its {claim.name} on port "
            f"{claim.address.port}. Stop it with: {_stop_command(launcher)}   or "
            "choose other ports with --port and --proxy-port"
        )
    stale = _stale_server(claim)
    if stale is not None:
        stop_process(stale, term_wait_s=term_wait_s)
        # A process loses its command line a moment before its sockets.
        _wait_until(lambda: not is_port_taken(claim.address), _CLOSE_WAIT_S)
    if is_port_taken(claim.address):
        holder = find_holder(claim.address.port)
        raise PortHeld(
            f"port {claim.address.port}, wanted for {claim.name}, is held by "
            f"{holder}: stop it, or choose another port"
        )
    return stale


def is_port_taken(address: Address) -> bool:
    """
    True if a server could not listen there now.

    Raises:
        PortHeld: nobody ever can: no address of this machine, or not for this user.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PortHeld(
                    f"cannot listen on {address.host} port {address.port}: "
                    f"{error.strerror}. Its host is set by MLX_HOST or PROXY_HOST"
                ) from None
            return True
    with contextlib.suppress(OSError):
        # On macOS a bind beside a listener on all addresses would succeed.
        socket.create_connection((address.local_host, address.port), 1.0).close()
        return True
    return False


def find_holder(port: int) -> Holder:
    """Find the process that listens on a port."""
    pids = _linux_pids(port) if _HAS_PROC else lsof_pids(port)
    pid = next(iter(pids), None)
    return Holder(pid, command_of(pid) if pid is not None else "")


def command_of(pid: int) -> str:
    """The command line of a process, or "" if it is gone or hidden."""
    if _HAS_PROC:
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return ""
        return raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return _output_of("ps", "-ww", "-p", str(pid), "-o", "command=")


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, as Ctrl-Z does, and not gone on since."""
    if _HAS_PROC:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])
    return _output_of("ps", "-p", str(pid), "-o", "state=").strip().startswith("T")


def lsof_pids(port: int) -> Iterator[int]:
    """Pids that `lsof` sees listening on a port; none where it is missing."""
    lines = _output_of("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-t")
    yield from (int(line) for line in lines.split() if line.isdecimal())


def stop_process(pid: int, *, term_wait_s: float) -> None:
    """Stop a process that is not our child: TERM, then KILL after a while."""
    for signum, wait_s in ((signal.SIGTERM, term_wait_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        # An ended process that nobody reaped still has a pid, but no command.
        if _wait_until(lambda: not command_of(pid), wait_s):
            return


def _stop_command(launcher: int | None) -> str:
    return "Ctrl-C in its terminal," if launcher is None else f"kill {launcher}"


def _stale_server(claim: Claim) -> int | None:
    # The recorded one counts even before it listens: it may still be loading.
    recorded = claim.pid_file.read()
    candidates = [Holder(recorded, command_of(recorded))] if recorded else []
    if is_port_taken(claim.address):
        candidates.append(find_holder(claim.address.port))
    return next((one.pid for one in candidates if claim.is_ours(one)), None)


def _wait_until(question: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _linux_pids(port: int) -> Iterator[int]:
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(item) in inodes for item in folder.iterdir()):
                yield int(folder.parent.name)


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                local_port = int(columns[1].rpartition(":")[2], 16)
                if columns[3] == _LISTEN and local_port == port:
                    yield columns[9]


def _output_of(*command: str) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
