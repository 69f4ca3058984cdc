"""A sidecar in a process of its own, with nothing of the tests' in it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from testkit.proxy import end_process, free_port
from testkit.servers import wait_ready

REPO = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class SidecarProcess:
    """Where it listens, and the process."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Its root."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def sidecar_process(
    folder: Path, settings: Mapping[str, str]
) -> Iterator[SidecarProcess]:
    """
    Start it and wait until it is ready; ended at the end.

    Args:
        folder: where it works, and for its output.
    """
    port = free_port()
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(REPO),
        "MLX_PORT": str(port), "ENABLE_REQUEST_LOGGING": "false", **settings,
    }  # fmt: skip
    with (folder / "sidecar.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar"],
            cwd=folder, env=env, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_ready(f"http://127.0.0.1:{port}")
        yield SidecarProcess(port, process)
    finally:
        end_process(process, 40)
