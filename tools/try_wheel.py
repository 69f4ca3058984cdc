"""
Builds the wheel and tries it in an empty environment, as who installs it has it.

    python -m tools.try_wheel [WHEEL]

In a folder that holds nothing of this checkout the built-in model answers one request,
and LiteLLM's plugin is imported. Exit code 0 if both went well.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

REPO = Path(__file__).parents[1]
_DEADLINE_S = 300.0
_EXTRA = "[cpu]" if sys.platform == "linux" else ""
_ASKED = {
    "model": "local", "max_tokens": 4,
    "messages": [{"role": "user", "content": "Hello"}],
}  # fmt: skip


def main() -> int:
    """Build, install, ask."""
    parser = argparse.ArgumentParser(prog="python -m tools.try_wheel")
    parser.add_argument("wheel", nargs="?", type=Path, help="default: one built now")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = options.wheel.resolve() if options.wheel else _built(folder / "dist")
        python = _installed(folder / "venv", wheel)
        empty = folder / "empty"
        empty.mkdir()
        _import_plugin(python, empty)
        print(f"{wheel.name}: {_answer(python, empty)!r}")
    return 0


def _built(out: Path) -> Path:
    subprocess.run(["uv", "build", "--wheel", "-o", out, REPO], check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def _installed(venv: Path, wheel: Path) -> Path:
    """The Python of a new environment that holds the wheel and what it needs."""
    subprocess.run(["uv", "venv", "--python", sys.executable, venv], check=True)
    python = venv / "bin" / "python"
    install = ["uv", "pip", "install", "--python", python, f"{wheel}{_EXTRA}"]
    subprocess.run(install, check=True)
    return python


def _import_plugin(python: Path, folder: Path) -> None:
    text = "import litellm_mlx.provider; print(litellm_mlx.__version__)"
    subprocess.run([python, "-c", text], cwd=folder, env=_env(folder), check=True)


def _answer(python: Path, folder: Path) -> str:
    """What the built-in model says, asked over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [python.with_name("mlx-sidecar"), "--port", str(port)]
    process = subprocess.Popen(command, cwd=folder, env=_env(folder))
    try:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                return _ask(port)
            except urllib.error.HTTPError:
                raise
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the sidecar did not answer")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(port: int) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(_ASKED).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        message = json.load(answer)["choices"][0]["message"]
    return str(message.get("content") or message.get("reasoning_content"))


def _env(folder: Path) -> dict[str, str]:
    """Nothing of this checkout's is found, and nothing of this user's is read."""
    kept = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the internet
    return {**kept, **quiet, "HOME": str(folder), "MODEL_DIR": "none"}


if __name__ == "__main__":
    sys.exit(main())
