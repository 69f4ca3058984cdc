"""
Tries an installation: every module, the self-test, an answer over the wire.

    .venv/bin/python tools/smoke.py

What `install_and_run.py --check` runs, and CI on the Pythons that the whole suite is
not run on. The built-in model, a free port, no setting of the user's. Exit code 0, or
1 with the reason.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sidecar", "litellm_mlx")
# What `install_and_run.py --full` brings: a module of ours may ask for it at import.
OF_EXTRAS = ("PIL", "mlx_vlm", "mlx_audio")
DEADLINE_S = 180.0
QUESTION = {
    "model": "local",
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": 200,
}


class Broken(Exception):
    """The installation does not work; the message says where."""


def main() -> int:
    """Try one after the other; the first fault ends it."""
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(f"imports      {import_all()}", flush=True)
            print(f"self-test    {self_test(folder)}", flush=True)
            print(f"wire         {ask(folder)!r}", flush=True)
        except Broken as fault:
            print(f"BROKEN: {fault}", file=sys.stderr, flush=True)
            return 1
    return 0


def import_all() -> str:
    """Import every module of both packages; how many could be."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
    names = list(PACKAGES)
    for package in PACKAGES:
        names += (
            found.name
            for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}.")
        )
    passed_over = 0
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name not in OF_EXTRAS:
                raise Broken(f"import {name} fails\n{traceback.format_exc()}") from None
            passed_over += 1
        except Exception:  # noqa: BLE001 - whatever it is, it is told
            raise Broken(f"import {name} fails\n{traceback.format_exc()}") from None
    need = f", {passed_over} need --full" if passed_over else ""
    return f"{len(names) - passed_over} modules{need}"


def self_test(folder: str) -> str:
    """Compare warm with cold on the built-in model; how many ways of reuse passed."""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "sidecar", "selftest", "built-in"],
            cwd=folder, env=environment(), capture_output=True, text=True,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise Broken(f"the self-test did not end: {late}") from None
    if ended.returncode != 0:
        raise Broken(f"the self-test fails\n{ended.stdout}{ended.stderr}")
    found = re.search(r"^\d+ ok.*$", ended.stdout, re.MULTILINE)
    if not found:
        raise Broken(f"the self-test says nothing\n{ended.stdout}")
    return found[0]


def ask(folder: str) -> str:
    """Start a sidecar on a free port and ask it something; its answer."""
    log = Path(folder, "sidecar.log")
    with running_sidecar(folder, log) as process:
        try:
            url = wait_ready(process, log)
            body = json.loads(fetch(f"{url}/v1/chat/completions", QUESTION))
            text = body["choices"][0]["message"]["content"]
        except (OSError, ValueError, LookupError) as error:
            detail = error.read() if isinstance(error, urllib.error.HTTPError) else b""
            said = f"{error!r} {detail.decode(errors='replace')}"
            raise Broken(f"no answer: {said}\n{log.read_text()}") from None
    if not isinstance(text, str) or not text.strip():
        raise Broken(f"an answer without text: {body}")
    return text


@contextlib.contextmanager
def running_sidecar(folder: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A sidecar that writes into `log`; ended at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", "--port", "0"],
            cwd=folder, env=environment(), stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Its root URL, once it answers."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Broken(f"the sidecar ended by itself\n{log.read_text()}")
        found = re.search(r"mlx-sidecar: (http://\S+)", log.read_text())
        if found:
            with contextlib.suppress(OSError):
                fetch(f"{found[1]}/health")
                return found[1]
        time.sleep(0.1)
    raise Broken(f"no sidecar after {DEADLINE_S:.0f} s\n{log.read_text()}")


def fetch(url: str, data: object = None) -> bytes:
    """GET, or POST of JSON; never by way of a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    raw = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(
        url, raw, headers={"Content-Type": "application/json"}
    )
    with opener.open(request, timeout=DEADLINE_S) as answer:
        content: bytes = answer.read()
    return content


def environment() -> dict[str, str]:
    """This process's, less the user's settings: they are not what is tried here."""
    example = (ROOT / ".env.example").read_text()
    ours = set(re.findall(r"^#? ?([A-Z][A-Z0-9_]+)=", example, re.MULTILINE))
    kept = {
        name: text
        for name, text in os.environ.items()
        if name not in ours and not name.startswith("MLX_SERVER_")
    }
    quiet = {"ENABLE_REQUEST_LOGGING": "false", "CACHE_SELFTEST": "off"}
    return {**kept, **quiet, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main())
