"""
Starts what is measured, each as a process with an environment of its own.

Nothing of the caller's environment is inherited but where a GPU's libraries are: every
process gets the same shim, one BLAS thread, no network, and a HOME of its own.
"""

import contextlib
import http.client
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.models import is_made
from bench.plain import PlainProcess
from bench.raw_batch import RawBatch

_START_S = 120.0
_PROOF_S = 300.0
# Where programs and a CUDA card's libraries are, and what was compiled for it.
_DEVICE = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "MLX_PTX_CACHE_DIR")
_STOP_S = 15.0
_TOLD = 2000  # characters of the log of what did not start


@dataclass(frozen=True, slots=True)
class Setup:
    """
    What all processes share.

    Args:
        model: its folder. shim: for LD_PRELOAD, or None.
        tree: repository whose sidecar is measured. scratch: for homes and logs.
        settings: of the environment, besides.
    """

    model: Path
    shim: Path | None
    tree: Path
    scratch: Path
    settings: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def sidecar(setup: Setup) -> Iterator[int]:
    """A ready sidecar, all of whose ways of reuse are proved; its port."""
    port = _free_port()
    arguments = ["-m", "sidecar", "--port", str(port), "--model", str(setup.model)]
    proved = replace(setup, settings={**setup.settings, "CACHE_SELFTEST": "on_load"})
    with _process(proved, "sidecar", arguments, setup.tree) as process:
        _wait_ready(process, port, _log(setup, "sidecar"))
        _wait_proved(process, port, _log(setup, "sidecar"))
        yield port


@contextlib.contextmanager
def starting_sidecar(setup: Setup) -> Iterator[int]:
    """A sidecar as it comes, ready or not; its port."""
    port = _free_port()
    arguments = ["-m", "sidecar", "--port", str(port), "--model", str(setup.model)]
    with _process(setup, "sidecar", arguments, setup.tree):
        yield port


@contextlib.contextmanager
def mlx_lm_server(setup: Setup) -> Iterator[int]:
    """A listening mlx_lm.server; its port. The first request waits for its load."""
    port = _free_port()
    arguments = ["-m", "mlx_lm", "server", "--port", str(port)]
    arguments += ["--model", str(setup.model)]
    with _process(setup, "mlx_lm_server", arguments, setup.tree) as process:
        _wait_ready(process, port, _log(setup, "mlx_lm_server"))
        yield port


@contextlib.contextmanager
def peer_server(setup: Setup, name: str, command: str) -> Iterator[int]:
    """
    Any OpenAI-compatible server, started by a command line; its port.

    Args:
        command: `{port}` and `{model}` in it are filled in; `python` is this one.
    """
    port = _free_port()
    filled = [
        part.format(port=port, model=setup.model) for part in shlex.split(command)
    ]
    program = sys.executable if filled[0] == "python" else filled[0]
    if not shutil.which(program):
        raise FileNotFoundError(f"{name}: no program {program}")
    with _process(setup, name, filled[1:], setup.tree, program) as process:
        _wait_ready(process, port, _log(setup, name))
        yield port


@contextlib.contextmanager
def plain_process(setup: Setup) -> Iterator[PlainProcess]:
    """A process that runs mlx_lm.stream_generate."""
    with _piped(setup, "plain") as process:
        yield PlainProcess(process)


@contextlib.contextmanager
def raw_batch(setup: Setup) -> Iterator[RawBatch]:
    """A process that runs mlx-lm's BatchGenerator."""
    with _piped(setup, "raw_batch") as process:
        yield RawBatch(process)


@contextlib.contextmanager
def _piped(setup: Setup, name: str) -> Iterator[subprocess.Popen[str]]:
    """A module of the benchmarks as a process that is asked over its pipes."""
    arguments = ["-m", f"bench.{name}", str(setup.model)]
    here = Path(__file__).parents[1]
    with _process(setup, name, arguments, here, is_piped=True) as process:
        yield process


def make_if_absent(setup: Setup) -> None:
    """Have the usual random model where the setup's one is not there."""
    if not is_made(setup.model):
        run_python(setup, ["-m", "bench.models", str(setup.model)])


def run_python(setup: Setup, arguments: list[str]) -> None:
    """Run Python to its end in the same environment as the servers."""
    environment = _environment(setup, "tool", Path(__file__).parents[1])
    command = [*environment, sys.executable, *arguments]
    subprocess.run(command, cwd=setup.scratch, check=True)


@contextlib.contextmanager
def _process(
    setup: Setup,
    name: str,
    arguments: list[str],
    path: Path,
    program: str = sys.executable,
    *,
    is_piped: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    with _log(setup, name).open("w") as log:
        process = subprocess.Popen(
            [*_environment(setup, name, path), program, *arguments],
            cwd=setup.scratch / name,  # no .env of the caller's folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if is_piped else log,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            _stop(process)


def _log(setup: Setup, name: str) -> Path:
    return setup.scratch / f"{name}.log"


def _environment(setup: Setup, name: str, path: Path) -> list[str]:
    home = setup.scratch / name
    home.mkdir(parents=True, exist_ok=True)
    values = {
        "PATH": os.defpath,
        "HOME": str(home),
        "PYTHONPATH": str(path),
        "HF_HUB_OFFLINE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MLX_MPI_LIBNAME": "none",  # one process; MPI would want more than this
    }
    values |= {name: os.environ[name] for name in _DEVICE if name in os.environ}  # noqa: TID251
    values |= setup.settings
    if setup.shim:
        values["LD_PRELOAD"] = str(setup.shim)
    # env executes Python in its own place, so the process keeps its pid.
    settings = [f"{key}={value}" for key, value in values.items()]
    return ["/usr/bin/env", "-i", *settings]


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[str], port: int, log: Path) -> None:
    _wait_until(lambda: _is_healthy(port), _START_S, process, log)


def _wait_proved(process: subprocess.Popen[str], port: int, log: Path) -> None:
    """A load waits for its self-test for a while: the rest would disturb streams."""
    _wait_until(lambda: _is_proved(port), _PROOF_S, process, log)


def _wait_until(
    check: Callable[[], bool],
    seconds: float,
    process: subprocess.Popen[str],
    log: Path,
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_text(errors="replace")[-_TOLD:]
            raise ChildProcessError(
                f"exit code {process.returncode} at its start: {said}"
            )
        if check():
            return
        time.sleep(0.1)
    raise TimeoutError(f"not ready within {seconds:g} seconds")


def _is_proved(port: int) -> bool:
    status, body = _get(port, "/admin/cache")
    if status != http.HTTPStatus.OK:
        raise ChildProcessError(f"/admin/cache answered {status}")
    return "pending" not in json.loads(body)["selftest"].values()


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def _is_healthy(port: int) -> bool:
    try:
        status, body = _get(port, "/health")
        if status == http.HTTPStatus.NOT_FOUND:  # a peer may have the second only
            status, body = _get(port, "/v1/models")
    except (OSError, http.client.HTTPException):
        return False
    # Ours answers before it is ready, too.
    return status == http.HTTPStatus.OK and b'"status":"loading"' not in body
