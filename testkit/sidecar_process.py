"""`python -m sidecar` as people start it: a process of its own, in an empty folder."""

import functools
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testkit.raw_http import exchange, request

REPO = Path(__file__).parents[1]
# Drops root's right to read everything: what nobody may read is then closed to it too.
_NO_PRIVILEGE = """
import ctypes, os, sys
if os.getuid() == 0:
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextmanager
def started(
    folder: Path,
    *flags: str,
    module: str = "sidecar",
    files: int | None = None,
    **settings: str,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """
    A sidecar on a free port, in an empty folder; ended at the end.

    Args:
        files: the hard limit of open files.
    """
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "HOME": str(folder)}
    command = [sys.executable, "-m", module, "--port", "0", *flags]
    process = subprocess.Popen(
        command, cwd=folder, env={**env, **settings}, stderr=subprocess.PIPE, text=True,
        preexec_fn=functools.partial(_limit_files, files) if files else None,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        found = re.match(r"mlx-sidecar: http://127\.0\.0\.1:(\d+) model=", first)
        assert found, first + process.stderr.read()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()


def _limit_files(maximum: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


def is_ready(port: int) -> bool:
    try:
        return bool(exchange(port, request("/health")).json["status"] == "ok")
    except OSError:
        return False


def run_to_the_end(folder: Path, *flags: str, **settings: str) -> tuple[int, str]:
    """`python -m sidecar` until it ends by itself; its code, and all it said."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "HOME": str(folder)}
    ended = subprocess.run(
        [sys.executable, "-c", _NO_PRIVILEGE, "-m", "sidecar", "--port", "0", *flags],
        cwd=folder, env={**env, **settings}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def fault_of(said: str) -> str:
    """The one line with the reason, and nothing else but the first line."""
    lines = [line for line in said.splitlines() if "mlx-sidecar: http" not in line]
    assert len(lines) == 1, said
    prefix, found, fault = lines[0].partition("mlx-sidecar: error: ")
    assert found, said
    assert prefix == ""
    return fault
