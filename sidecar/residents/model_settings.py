"""
What people set for single models: a JSON file, read at the start, written whole.

    {"default_model": "qwen3-8b",
     "models": {"qwen3-8b": {"pinned": true, "ttl_seconds": 600, "alias": "coder"}}}
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sidecar.config.sources import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """
    One model's; None: as the environment says.

    Args:
        ttl_seconds: idle seconds after which it leaves; 0: never.
        alias: one more name. family: its prompt format.
    """

    pinned: bool | None = None
    ttl_seconds: float | None = None
    alias: str | None = None
    family: str | None = None


NOTHING_SET = ModelSettings()
_TYPES: Mapping[str, tuple[type, ...]] = {
    "pinned": (bool,), "ttl_seconds": (int, float), "alias": (str,), "family": (str,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """All of the file."""

    default_model: str | None
    models: Mapping[str, ModelSettings]


def read_settings(path: Path | None) -> SettingsFile:
    """
    Read the file; one that is not there is empty.

    Raises:
        ConfigError: it cannot be used; the field is named.
    """
    if path is None or not path.exists():
        return SettingsFile(None, {})
    try:
        body = json.loads(path.read_bytes())
        models = body.get("models", {})
        found = {name: parse_settings(one) for name, one in models.items()}
        default = body.get("default_model")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"MODEL_SETTINGS_PATH={path}: {error}") from None
    if default is not None and not isinstance(default, str):
        raise ConfigError(f"MODEL_SETTINGS_PATH={path}: default_model must be text")
    return SettingsFile(default, found)


def parse_settings(body: Any) -> ModelSettings:
    """
    Check one model's settings.

    Raises:
        ValueError: naming the field and what it may be.
    """
    if not isinstance(body, Mapping):
        raise ValueError("a model's settings must be an object")
    known = [field.name for field in fields(ModelSettings)]
    for name, value in body.items():
        if name not in known:
            raise ValueError(f"{name} is not one of {', '.join(known)}")
        if value is None:
            continue
        is_flag = isinstance(value, bool) and name != "pinned"
        if is_flag or not isinstance(value, _TYPES[name]):
            words = " or ".join(kind.__name__ for kind in _TYPES[name])
            raise ValueError(f"{name} must be {words}")
        if isinstance(value, (int, float)) and not 0 <= value <= 1e9:
            raise ValueError("ttl_seconds must be 0..1e9")
    return ModelSettings(**body)


def write_settings(path: Path, settings: SettingsFile) -> None:
    """Write the file in one step: a crash leaves the old one."""
    models = {
        name: {key: value for key, value in asdict(one).items() if value is not None}
        for name, one in settings.models.items()
    }
    body: dict[str, Any] = {"models": models}
    if settings.default_model:
        body = {"default_model": settings.default_model, **body}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(body, file, indent=2, ensure_ascii=False)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
