"""Whether LiteLLM's config says what its user means."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from litellm_mlx.launcher.doctor.finding import Finding
from litellm_mlx.launcher.proxy_config import ProxyConfigError, read_user_config
from litellm_mlx.launcher.settings import PACKAGE_PARENT, LaunchSettings

_TESTED = (1, 106)


def check_litellm(settings: LaunchSettings) -> Iterator[Finding]:
    """Findings of the config and of the version."""
    found = [*_version(), *_config(settings)]
    yield from found
    if not found:
        yield Finding("litellm", "ok", "its config parses, its fallbacks are there")


def _version() -> Iterator[Finding]:
    text = importlib.metadata.version("litellm")
    parts = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    if parts < _TESTED:
        found = f"LiteLLM {text} is older than what was tested"
        mend = "python3 install_and_run.py --check"
        yield Finding("litellm", "bad", found, mend)


def _config(settings: LaunchSettings) -> Iterator[Finding]:
    path = settings.config_path
    try:
        config = read_user_config(path, required=settings.config_required)
    except ProxyConfigError as error:
        yield Finding("litellm", "bad", str(error), f"correct {path}")
        return
    yield from _fallbacks(config, str(path))
    if (path.parent / "litellm_mlx").is_dir() and path.parent != PACKAGE_PARENT:
        found = f"{path.parent}/litellm_mlx would be loaded in our plugin's place"
        yield Finding("litellm", "bad", found, "rename that folder")
    callbacks = _of(config, "litellm_settings").get("callbacks") or []
    is_quiet = _of(config, "litellm_settings").get("turn_off_message_logging")
    if "otel" in callbacks and not is_quiet:
        found = "OpenTelemetry is on, and sends prompts and answers along"
        mend = f"set litellm_settings.turn_off_message_logging: true in {path}"
        yield Finding("litellm", "warn", found, mend)


def _fallbacks(config: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Names that no entry has: a request would fail where it should go on."""
    entries = config.get("model_list") or []
    names = {entry.get("model_name") for entry in entries if isinstance(entry, dict)}
    names |= {"local", "mlx/*"}
    for place in ("router_settings", "litellm_settings"):
        for rule in _of(config, place).get("fallbacks") or []:
            targets = rule.values() if isinstance(rule, dict) else []
            for target in (name for goal in targets for name in goal):
                if target not in names and "*" not in str(target):
                    found = f"a fallback names {target}, which no model_name is"
                    mend = f"add it to model_list in {path}, or correct the name"
                    yield Finding("litellm", "bad", found, mend)


def _of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
