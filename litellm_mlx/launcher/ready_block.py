"""What the user reads once all is up: what runs, where, and what to try."""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from litellm_mlx.launcher.clients.client_setup import CLIENTS
from litellm_mlx.launcher.settings import MASTER_KEY, Address, LaunchSettings
from litellm_mlx.served_models import SidecarModel

_MAX_CHARS = 60  # of names
_WIDTH = 69  # of a text beside the titles
_GB = 1e9  # as the files of models are counted


@dataclass(frozen=True, slots=True)
class HealthReport:
    """
    What the sidecar says of itself.

    Args:
        limit_bytes: what it may take. wired: for a Mac's GPU; None: not on this device.
        fault: why the default model cannot be served; None: it can.
    """

    limit_bytes: int | None = None
    wired: str | None = None
    fault: str | None = None


def ready_block(
    settings: LaunchSettings,
    models: Sequence[SidecarModel],
    *,
    needs_key: bool,
    health: HealthReport,
    others: Sequence[str] = (),
) -> str:
    """
    The block, in one piece.

    Args:
        needs_key: of clients. health: the sidecar's.
        others: models of LiteLLM's that are not the sidecar's.
    """
    names = [name for model in models for name in (*model.aliases, model.id)]
    name = "local" if "local" in names or not names else names[0]
    rows = [
        *_addresses(settings),
        *_model(settings, models, name, health.fault),
        *_advice(settings),
        *_memory(health),
        ("key", _key(settings, needs_key)),
        *_reach(settings, needs_key, others),
        ("prompts", _logs(settings)),
        ("log", _shortened(settings.servers_log)),
        ("page", f"{settings.sidecar.url}/admin/"),
        *_agents(settings),
        *_curl(settings, name, needs_key),
        ("stop", "Ctrl-C"),
    ]
    lines = [f"  {title:8} {text}".rstrip() for title, text in rows]
    return "\n".join(["", "Ready.", *lines, ""])


def fetch_health(settings: LaunchSettings, timeout_s: float = 30.0) -> HealthReport:
    """What the running sidecar says; nothing if it does not answer."""
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s) as client:
            body = client.get(f"{settings.sidecar.url}/health").json()
    except (httpx.HTTPError, ValueError):
        return HealthReport()
    status = body if isinstance(body, dict) else {}
    limit, wired = status.get("memory_limit_bytes"), status.get("wired")
    reason = status.get("reason") if status.get("status") == "degraded" else None
    return HealthReport(
        limit if isinstance(limit, int) else None,
        wired if isinstance(wired, str) else None,
        reason if isinstance(reason, str) else None,
    )


def _addresses(settings: LaunchSettings) -> Iterator[tuple[str, str]]:
    if settings.proxy:
        yield "LiteLLM", f"{settings.proxy.url}/v1   (OpenAI clients)"
        yield "", f"{settings.proxy.url}      (Anthropic clients)"
    yield "sidecar", f"{settings.sidecar.url}/v1"


def _model(
    settings: LaunchSettings,
    models: Sequence[SidecarModel],
    name: str,
    fault: str | None,
) -> Iterator[tuple[str, str]]:
    served = settings.model_path or "the small built-in model"
    text = served if name == served else f"{name}, which is {served}"
    if fault is not None:
        yield "model", f"{text}; IT CANNOT BE SERVED, others can:"
        shown = "".join(c if c.isprintable() else "?" for c in fault)
        yield from (("", line) for line in textwrap.wrap(shown, _WIDTH))
        return
    length = next((one.max_input_tokens for one in models if one.max_input_tokens), 0)
    yield "model", f"{text}; context of {length} tokens" if length else text


def _advice(settings: LaunchSettings) -> Iterator[tuple[str, str]]:
    """Where to find a real model, while none is set."""
    if settings.model_path is None:
        yield "", f"a toy: {_beside_python('mlx-sidecar')} recommend"


def _memory(health: HealthReport) -> Iterator[tuple[str, str]]:
    if limit := health.limit_bytes:
        yield "memory", f"at most {limit / _GB:.1f} GB (MAX_PROCESS_MEMORY)"
    if health.wired:
        risk = "" if health.wired == "off" else "; on many Macs this panics the kernel"
        yield "wired", f"{health.wired} (WIRED_LIMIT{risk})"


def _key(settings: LaunchSettings, needs_key: bool) -> str:
    if needs_key:
        return f"{_key_name(settings)} (if it is in .env: `. ./.env` sets it)"
    return "none needed, clients may send any"


def _reach(
    settings: LaunchSettings, needs_key: bool, others: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Who gets in where, and with what."""
    title = "reach"
    if settings.proxy:
        what = f"with {MASTER_KEY}" if needs_key else "no key, the models' routes only"
        yield title, f"LiteLLM: {_whom(settings.proxy)}, {what}"
        title = ""
        if others and not needs_key:
            named = ", ".join(dict.fromkeys(others))[:_MAX_CHARS]
            yield "", f"and may use {named} on your keys ({MASTER_KEY} shuts that)"
    key = "with MLX_API_KEY" if settings.api_key else "no key"
    yield title, f"sidecar: {_whom(settings.sidecar)}, {key}"
    pages = settings.child_env.get("CORS_ALLOW_ORIGINS", "").strip()
    yield "", f"web pages: {pages or 'none (CORS_ALLOW_ORIGINS)'}"


def _whom(address: Address) -> str:
    return "programs on this machine" if address.is_loopback else "OTHER MACHINES TOO"


def _logs(settings: LaunchSettings) -> str:
    logs = settings.logs
    if not logs.is_on:
        return "not logged"
    root = _shortened(logs.root)
    if not logs.with_content:
        return f"not logged; numbers of each request in {root}"
    return f"logged in {root} (LOG_CONTENT=false: numbers only)"


def _shortened(path: Path) -> str:
    """As people write it: from the folder at hand, or from their home."""
    for folder, sign in ((Path.cwd(), "."), (Path.home(), "~")):
        if path.is_relative_to(folder):
            return f"{sign}/{path.relative_to(folder)}"
    return str(path)


def _agents(settings: LaunchSettings) -> Iterator[tuple[str, str]]:
    """The clients that are installed here, each started by one line."""
    if settings.proxy is None:
        return
    found = [name for name in CLIENTS if shutil.which(name)]
    names = " | ".join(found) or "CLIENT"
    yield "agents", f"{_beside_python('litellm-mlx')} launch {names}"


def _beside_python(command: str) -> str:
    """A command of this installation, as people write it."""
    return f"{_shortened(Path(sys.executable).parent)}/{command}"


def _curl(
    settings: LaunchSettings, name: str, needs_key: bool
) -> Iterator[tuple[str, str]]:
    """A request to paste, in lines of at most 80 characters."""
    front = settings.proxy or settings.sidecar
    asked = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
    body = json.dumps(asked, separators=(",", ":"))
    yield "try", f"curl {front.url}/v1/chat/completions \\"
    if needs_key:
        yield "", f'-H "Authorization: Bearer ${_key_name(settings)}" \\'
    yield "", "-H 'Content-Type: application/json' \\"
    yield "", f"-d {shlex.quote(body)}"


def _key_name(settings: LaunchSettings) -> str:
    return MASTER_KEY if settings.proxy else "MLX_API_KEY"
