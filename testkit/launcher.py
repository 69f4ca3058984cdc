"""The launcher as users run it: a process with real children, stopped by signals."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from litellm_mlx.launcher.ports import PidFile
from testkit.proxy import free_port

REPO = Path(__file__).parents[1]


class Launcher:
    """
    A running launcher.

    `-m` looks in the working folder first: a `sidecar` package there takes the
    place of the real one.

    Args:
        folder: where it works, and for its caches. env: beside the tests' own.
    """

    def __init__(
        self, folder: Path, *arguments: str, port: int | None = None, **env: str
    ) -> None:
        self.folder = folder
        self.port, self.proxy_port = port or free_port(), free_port()
        command = [sys.executable, "-m", "litellm_mlx.launcher", *arguments]
        command += ["--port", str(self.port), "--proxy-port", str(self.proxy_port)]
        clean = {k: v for k, v in os.environ.items() if k != "LITELLM_MASTER_KEY"}
        home = {"MLX_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(REPO)}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**clean, **home, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        """Where LiteLLM listens."""
        return f"http://127.0.0.1:{self.proxy_port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.output += line

    def wait_for(self, text: str, timeout_s: float = 200.0) -> None:
        """Wait until it has said that."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.output}"
            time.sleep(0.05)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(180)
        self._reader.join(60)
        return code

    def pid_of(self, name: str, port: int) -> int | None:
        """The pid of the sidecar or the proxy it started."""
        file = PidFile(self.folder / f"cache/run/{name}-{port}.pid")
        with contextlib.closing(file):
            return file.read()
