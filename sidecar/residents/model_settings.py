"""
What people set for single models: a JSON file, read at each look for models.

    {"default_model": "qwen3-8b",
     "models": {"qwen3-8b": {"pinned": true, "ttl_seconds": 600, "alias": "coder"}}}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sidecar.config.settings import Config
from sidecar.config.sources import ConfigError
from sidecar.config.values import BUILTIN
from sidecar.kv.disk.durable_files import replace_private
from sidecar.output.syntax_settings import NAMES, SyntaxSettings


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """
    One model's; None: as the environment says.

    Args:
        ttl_seconds: idle seconds after which it leaves; 0: never.
        alias: one more name. draft_model: in place of DRAFT_MODEL, from its next load
            on; "": none.
        family, tool_parser, reasoning_parser: of its output, see SyntaxSettings; they
            hold from its next load on.
        adapter_path: the folder of the adapter that it is read with where a request
            names none, from its next load on; "": none.
    """

    pinned: bool | None = None
    ttl_seconds: float | None = None
    alias: str | None = None
    family: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    draft_model: str | None = None
    adapter_path: str | None = None

    @property
    def syntax(self) -> SyntaxSettings:
        """What it says of the model's output."""
        return SyntaxSettings(self.family, self.tool_parser, self.reasoning_parser)


_LONGEST_S = 1e9
NOTHING_SET = ModelSettings()
_TYPES: Mapping[str, tuple[type, ...]] = {
    "pinned": (bool,),
    "ttl_seconds": (int, float),
    "alias": (str,),
    "family": (str,),
    "tool_parser": (str,),
    "reasoning_parser": (str,),
    "draft_model": (str,),
    "adapter_path": (str,),
}


_WORDS = {bool: "true or false", int: "a number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """All of the file."""

    default_model: str | None
    models: Mapping[str, ModelSettings]


def settings_file(config: Config) -> Path:
    """Where people's settings of single models are; it need not be there."""
    path = config.model.settings_path
    return Path(path) if path else config.disk.home / "model-settings.json"


def read_settings(path: Path) -> SettingsFile:
    """
    Read the file; one that is not there is empty.

    Raises:
        ConfigError: it cannot be used; the field is named.
    """
    try:
        if not path.exists():
            return SettingsFile(None, {})
        body = json.loads(path.read_bytes())
        models = body.get("models", {})
        found = {name: parse_settings(one) for name, one in models.items()}
        default = body.get("default_model")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"MODEL_SETTINGS_PATH={path}: {error}") from None
    if default is not None and not isinstance(default, str):
        raise ConfigError(f"MODEL_SETTINGS_PATH={path}: default_model must be text")
    return SettingsFile(default, found)


def with_default_model(config: Config) -> Config:
    """
    With the default model that the file names, which beats MODEL_PATH.

    Raises:
        ConfigError: as `read_settings`.
    """
    wished = read_settings(settings_file(config)).default_model
    if wished is None:
        return config
    path = None if wished in BUILTIN else wished
    return replace(config, model=replace(config.model, path=path))


def keep_settings(
    file: Path, names: Sequence[str], changes: Mapping[str, object]
) -> None:
    """
    Write what was set for a model, beside all else that the file says.

    Args:
        names: of the model; under which it stands there already, else the first.
    Raises:
        OSError: it cannot be written. ConfigError: it cannot be used as it is.
    """
    read_settings(file)  # what cannot be used is not replaced
    body = json.loads(file.read_bytes()) if file.exists() else {}
    models = body.setdefault("models", {})
    own = next((name for name in names if name in models), names[0])
    models[own] = {**models.get(own, {}), **changes}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_private(file, json.dumps(body, indent=1).encode())


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
        if value is not None:
            check_setting(name, value)
    return ModelSettings(**body)


def check_setting(name: str, value: object) -> None:
    """
    Check one setting of a name that is known.

    Raises:
        ValueError: naming it and what it may be.
    """
    is_flag = isinstance(value, bool) and name != "pinned"
    if is_flag or not isinstance(value, _TYPES[name]):
        words = " or ".join(dict.fromkeys(_WORDS[kind] for kind in _TYPES[name]))
        raise ValueError(f"{name} must be {words}")
    if isinstance(value, str) and name in NAMES and value not in NAMES[name]:
        raise ValueError(f"{name} must be one of {', '.join(NAMES[name])}")
    if isinstance(value, (int, float)) and not 0 <= value <= _LONGEST_S:
        raise ValueError(f"{name} must be 0..{_LONGEST_S:g}")
