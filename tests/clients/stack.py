"""The production launcher of any checkout, serving a scripted tiny model."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testkit.proxy import free_port
from testkit.tiny_models import make_model
from tests.clients.recorder import recording

REPO = Path(__file__).parents[2]
_START_S = 240.0
_STOP_S = 60.0
_PACKAGE = """import os
real = os.path.join(os.environ["CLIENTS_TREE"], "sidecar")
__path__ = [os.path.dirname(__file__), real]
"""
_MAIN = """from tests.clients.scripted_main import main
main()
"""


@dataclass(frozen=True, slots=True)
class Stack:
    """
    What runs.

    Args:
        url: where clients connect: the recorder, which hands on to LiteLLM.
        run: its folder: requests.jsonl (sidecar), wire.jsonl (clients), launcher.log.
    """

    url: str
    sidecar_url: str
    run: Path

    def work_in(self, folder: Path) -> None:
        """Tell the script where the agent works now."""
        (self.run / "cwd").write_text(str(folder))


@contextlib.contextmanager
def running_stack(
    tree: Path, kind: str, run: Path, settings: dict[str, str]
) -> Iterator[Stack]:
    """
    Start sidecar and LiteLLM as users do and wait until both answer.

    Args:
        tree: the checkout whose sidecar and plugin run.
        kind: of the tiny model: dense, hybrid, sliding.
    """
    run.mkdir(parents=True, exist_ok=True)
    # With one layer a prefill computes no attention: fast however long the prompt.
    layers = 1 if kind == "dense" else 2
    model = make_model(run / f"scripted-{kind}", kind, layers=layers, hidden=32)
    package = run / "sidecar"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "__main__.py").write_text(_MAIN)
    # `tests` is no package of one place: these runners, though the tree may have some.
    (run / "tests").mkdir(exist_ok=True)
    (run / "tests/clients").symlink_to(Path(__file__).parent)
    shutil.copy(tree / "litellm_config.yaml", run / "litellm_config.yaml")
    port, proxy_port = free_port(), free_port()
    command = [sys.executable, "-m", "litellm_mlx.launcher", "--model", str(model)]
    command += ["--port", str(port), "--proxy-port", str(proxy_port)]
    with (run / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=run, env=_env(tree, run, settings), stdout=log, stderr=log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        _wait_ready(process, run / "launcher.log")
        with recording(proxy_port, run / "wire.jsonl") as recorder:
            yield Stack(recorder.url, f"http://127.0.0.1:{port}", run)
    finally:
        _end(process)


def _env(tree: Path, run: Path, settings: dict[str, str]) -> dict[str, str]:
    home = run / "home"
    home.mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(map(str, (run, tree, REPO))),
        "PYTHONUNBUFFERED": "1",
        "MLX_CACHE_HOME": str(run / "cache"),
        "LOG_ROOT": str(run / "logs"),
        "CACHE_VERIFY": "true",
        "CLIENTS_RUN": str(run),
        "CLIENTS_TREE": str(tree),
        **settings,
    }


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if "Ready." in log.read_text(errors="replace"):
            return
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-4000:]
    raise TimeoutError(f"the launcher did not start:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the second one stops at once
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    if process.poll() is None:
        process.kill()
        process.wait(5)
