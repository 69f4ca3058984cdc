"""A real LiteLLM proxy with the plugin, in a process of its own."""

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from litellm_mlx.launcher.proxy_config import (
    build_config,
    read_user_config,
    write_config,
)
from litellm_mlx.launcher.services import PROXY_COMMAND
from litellm_mlx.served_models import NATIVE_ROUTES, Upstream, parse_models

REPO = Path(__file__).parents[1]
_START_S = 120.0  # cold files; 8 s are usual
_REQUEST_S = 300.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy: its root URL, its log, and clients for it."""

    url: str
    log: Path
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    http: httpx.Client


@contextlib.contextmanager
def running_proxy(
    sidecar_url: str,
    folder: Path,
    *,
    more: Mapping[str, str] | None = None,
    port: int | None = None,
    own: Mapping[str, Any] | None = None,
    keepalive_s: float = 15.0,
    sidecar_key: str | None = None,
) -> Iterator[Proxy]:
    """
    A proxy for a sidecar, set up as the launcher does it; ended at the end.

    Args:
        folder: for its config, its log and its home.
        more: names of further deployments, each with the URL of another sidecar.
        port: where to listen; any free one by default.
        own: what the user's config says beside the shipped one; a list is added to.
        keepalive_s: longest silence of a stream.
        sidecar_key: the sidecar's MLX_API_KEY, if it has one.
    """
    port = port or free_port()
    config = folder / "config.yaml"
    upstream = Upstream(
        f"{sidecar_url}/v1", _REQUEST_S, keepalive_s, has_key=sidecar_key is not None
    )
    secret = {} if sidecar_key is None else {"MLX_API_KEY": sidecar_key}
    settings = _config(sidecar_url, upstream, more or {}, own or {}, sidecar_key)
    write_config(config, settings)
    command = [*PROXY_COMMAND, "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    log = folder / "proxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=_env(folder) | secret, stdout=output, stderr=output
        )
    try:
        with _clients(f"http://127.0.0.1:{port}", log) as proxy:
            _wait_ready(proxy, process)
            yield proxy
    finally:
        end_process(process)


_given: set[int] = set()


def free_port() -> int:
    """
    A port nobody listens on just now, and that the system gives to nobody who asks.

    Else another test's server could be given it before the one it is meant for binds.
    Nor is it given twice here: two servers that start together ask before either binds.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


@contextlib.contextmanager
def _clients(url: str, log: Path) -> Iterator[Proxy]:
    same: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": _REQUEST_S}
    with (
        openai.OpenAI(base_url=f"{url}/v1", **same) as chat,
        anthropic.Anthropic(base_url=url, **same) as messages,
        httpx.Client(base_url=url, timeout=_REQUEST_S, trust_env=False) as http,
    ):
        yield Proxy(url, log, chat, messages, http)


def _config(
    sidecar_url: str,
    upstream: Upstream,
    more: Mapping[str, str],
    own: Mapping[str, Any],
    sidecar_key: str | None,
) -> dict[str, Any]:
    user = read_user_config(REPO / "litellm_config.yaml", required=True)
    for name, value in own.items():
        if isinstance(value, list):
            user[name] = [*(user.get(name) or []), *value]
        else:
            user[name] = {**(user.get(name) or {}), **value}
    key = {"Authorization": f"Bearer {sidecar_key}"} if sidecar_key else {}
    answer = httpx.get(f"{sidecar_url}/v1/models", headers=key, trust_env=False)
    config = build_config(
        user, parse_models(answer.json()), upstream, permit_no_key=True
    )
    for name, url in more.items():
        params = {"model": "mlx/local", "api_base": f"{url}/v1", "timeout": _REQUEST_S}
        entry = {"model_name": name, "litellm_params": params}
        config["model_list"].append({**entry, "model_info": dict(NATIVE_ROUTES)})
    return config


def _env(folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(REPO),
        "PYTHONUNBUFFERED": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        # For the internet, not for this machine: whatever goes there fails.
        "HTTP_PROXY": "http://127.0.0.1:1",
    }


def _wait_ready(proxy: Proxy, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if proxy.http.get("/health/liveliness").status_code == 200:
                return
        time.sleep(0.1)
    tail = proxy.log.read_text(errors="replace")[-4000:]
    raise TimeoutError(f"the proxy did not start:\n{tail}")


def end_process(process: subprocess.Popen[bytes], wait_s: float = 20) -> None:
    """SIGTERM; SIGKILL if that did not end it in time."""
    process.terminate()
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
