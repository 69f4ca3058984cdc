"""Who holds a port, and which left-over servers may be stopped; real processes."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from litellm_mlx.launcher.ports import (
    Claim,
    PidFile,
    PortHeld,
    claim_port,
    find_holder,
    is_port_taken,
    lsof_pids,
)
from litellm_mlx.launcher.services import PROXY_COMMAND
from litellm_mlx.launcher.settings import Address

LISTEN = """
import signal, socket, sys, time
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""
Listen = Callable[..., tuple[subprocess.Popen[str], int]]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Start a process that listens; its arguments are in its command line."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> tuple[subprocess.Popen[str], int]:
            process = subprocess.Popen(
                [sys.executable, "-c", LISTEN, *arguments],
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, int(process.stdout.readline())

        yield start


def claim(tmp_path: Path, port: int, own_argument: str | None = None) -> Claim:
    pid_file = PidFile(tmp_path / "run" / f"litellm-{port}.pid")
    return Claim("litellm", Address("127.0.0.1", port), pid_file, own_argument)


def test_the_holder_of_a_port_is_found(listen: Listen) -> None:
    """The process that listens is named with its pid and command."""
    process, port = listen("a-word-of-its-own")
    holder = find_holder(port)
    assert holder.pid == process.pid
    assert "a-word-of-its-own" in str(holder)


@pytest.mark.skipif(shutil.which("lsof") is None, reason="needs lsof")
def test_lsof_finds_the_same_holder(listen: Listen) -> None:
    """What macOS uses instead of /proc names the same process."""
    process, port = listen()
    assert list(lsof_pids(port)) == [process.pid]


def test_a_free_port_is_claimed(tmp_path: Path) -> None:
    """A port nobody holds is ours, and nothing is stopped for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_port_taken(Address("127.0.0.1", port))
        assert is_port_taken(Address("0.0.0.0", port))
    assert claim_port(claim(tmp_path, port)) is None


def test_an_address_of_another_machine_is_told_at_once(tmp_path: Path) -> None:
    """Not by LiteLLM, after the model is loaded."""
    elsewhere = PidFile(tmp_path / "run" / "litellm.pid")
    with pytest.raises(
        PortHeld, match=r"listen on 0\.0\.0\.1 .*MLX_HOST or PROXY_HOST"
    ):
        claim_port(Claim("litellm", Address("0.0.0.1", 4000), elsewhere))


def test_a_foreign_holder_is_named_and_left_alone(
    listen: Listen, tmp_path: Path
) -> None:
    """A process that is not ours keeps its port, and the message says who it is."""
    process, port = listen("litellm")
    with pytest.raises(PortHeld, match=rf"held by pid {process.pid} \(.*litellm"):
        claim_port(claim(tmp_path, port, own_argument="/run/litellm_config-4000.yaml"))
    assert process.poll() is None


def test_a_left_over_with_our_config_is_stopped(listen: Listen, tmp_path: Path) -> None:
    """A LiteLLM whose command line names our generated config is stopped by TERM."""
    config = str(tmp_path / "run" / "litellm_config-4000.yaml")
    process, port = listen("--config", config)
    assert claim_port(claim(tmp_path, port, own_argument=config)) == process.pid
    assert process.wait(120) == -15


@pytest.mark.parametrize("command", [("litellm",), PROXY_COMMAND[1:]], ids=len)
def test_a_left_over_in_our_pid_file_is_stopped(
    command: tuple[str, ...], listen: Listen, tmp_path: Path
) -> None:
    """A process that our pid file and its own name show to be ours is stopped."""
    process, port = listen(*command)
    wanted = claim(tmp_path, port)
    wanted.pid_file.write(process.pid)
    assert claim_port(wanted) == process.pid
    assert process.wait(120) == -15


def test_a_pid_that_passed_to_a_stranger_is_left_alone(
    listen: Listen, tmp_path: Path
) -> None:
    """A pid in our file whose process bears another name is not ours any more."""
    process, port = listen("something-else")
    wanted = claim(tmp_path, port)
    wanted.pid_file.write(process.pid)
    with pytest.raises(PortHeld):
        claim_port(wanted)
    assert process.poll() is None


def test_a_full_disk_costs_the_pid_and_nothing_else(tmp_path: Path) -> None:
    """The one before stays, and what is written later has the room that it had."""
    file = tmp_path / "a.pid"
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))"
    script = f"""
import resource
from pathlib import Path
from litellm_mlx.launcher.ports import PidFile
pids = PidFile(Path({str(file)!r}))
pids.write(123456)
size = pids.path.stat().st_size
{full}
pids.write(7)
assert (pids.read(), pids.path.stat().st_size) == (123456, size)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
for pid in (89, None):
    pids.write(pid)
    assert (pids.read(), pids.path.stat().st_size) == (pid, size)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"{file} cannot be written: " in ran.stderr


def test_a_stubborn_left_over_is_killed(listen: Listen, tmp_path: Path) -> None:
    """A left-over that ignores TERM is killed after a while."""
    process, port = listen("litellm", "stubborn")
    wanted = claim(tmp_path, port)
    wanted.pid_file.write(process.pid)
    assert claim_port(wanted, term_wait_s=0.3) == process.pid
    assert process.wait(120) == -9


def test_a_running_launcher_keeps_its_servers(tmp_path: Path) -> None:
    """While the launcher of a server lives, a second one does not stop the server."""
    path = tmp_path / "run" / "litellm-4000.pid"
    PidFile(path).write(4321)
    hold = (
        "import sys, time; from pathlib import Path; "
        "from litellm_mlx.launcher.ports import PidFile; "
        "print(PidFile(Path(sys.argv[1])).lock(), flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "True"
        with pytest.raises(PortHeld, match=rf"with: kill {other.pid} .*--port"):
            claim_port(claim(tmp_path, 4000))
        # Its server is told from the launcher, and is another one after a restart.
        assert PidFile(path).read() == 4321
        other.kill()
    deadline = time.monotonic() + 120
    while not PidFile(path).lock():
        assert time.monotonic() < deadline
