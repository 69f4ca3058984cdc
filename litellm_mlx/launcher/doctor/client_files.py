"""Whether clients that are set up by hand point here, with the right context."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from litellm_mlx.json_objects import as_object
from litellm_mlx.launcher.clients.client_setup import CLIENTS
from litellm_mlx.launcher.clients.user_files import readable_json
from litellm_mlx.launcher.doctor.finding import Finding
from litellm_mlx.launcher.settings import LaunchSettings

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONTEXT = "CLAUDE_CODE_MAX_CONTEXT_TOKENS"
_BASE = "ANTHROPIC_BASE_URL"


def check_clients(
    settings: LaunchSettings, home: Path, context: int | None
) -> Iterator[Finding]:
    """
    Findings of the clients' own files, which are read, never written.

    Args:
        home: the user's. context: of the model that is served, if one answers.
    """
    found = [*_claude(settings, home, context), *_pi(settings, home, context)]
    yield from found
    installed = [name for name in CLIENTS if shutil.which(name)]
    if installed and not found:
        yield Finding("clients", "ok", f"installed: {', '.join(installed)}")


def _claude(
    settings: LaunchSettings, home: Path, context: int | None
) -> Iterator[Finding]:
    file = home / ".claude/settings.json"
    env = readable_json(file).get("env")
    if not isinstance(env, dict):
        return
    mend = "litellm-mlx launch claude, which needs no change of that file"
    base = str(env.get(_BASE) or "")
    if base and not _is_ours(base, settings):
        found = f"{file} sends Claude Code to {base}, whatever the environment says"
        yield Finding("clients", "warn", found, mend)
        return
    said = str(env.get(_CONTEXT) or "")
    if base and not said.isdecimal():
        found = f"{file} has no {_CONTEXT}: it assumes a million tokens"
        yield Finding("clients", "warn", found, mend)
    elif base and context and int(said) > context:
        found = f"{file} says {said} tokens of context, the model has {context}"
        yield Finding("clients", "warn", found, f"set {_CONTEXT} to {context} there")


def _pi(settings: LaunchSettings, home: Path, context: int | None) -> Iterator[Finding]:
    file = home / ".pi/agent/models.json"
    providers = as_object(readable_json(file).get("providers"))
    for name, provider in providers.items() if context else ():
        own = as_object(provider)
        models = own.get("models")
        if not _is_ours(str(own.get("baseUrl")), settings):
            continue
        for model in models if isinstance(models, list) else ():
            said = as_object(model).get("contextWindow")
            if isinstance(said, int) and context and said > context:
                found = f"{file} says {said} tokens for {name}, the model has {context}"
                mend = f"set contextWindow to {context} there"
                yield Finding("clients", "warn", found, mend)


def _is_ours(url: str, settings: LaunchSettings) -> bool:
    ports = {settings.sidecar.port, settings.proxy.port if settings.proxy else 0}
    try:
        parts = urlsplit(url)
        return parts.hostname in _LOOPBACK and parts.port in ports
    except ValueError:  # it has no port, or half an address
        return False
