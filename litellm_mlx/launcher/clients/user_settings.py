"""
What stands in a client's own settings, once the user asks for it (`launch --write`).

An editor that starts the client by itself passes it nothing: its settings must say
where the model is. Keys are added to an object of strict JSON; of a format with
comments, which would be lost, a text is given that the user puts in.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients import qwen_files
from litellm_mlx.launcher.clients.claude_files import claude_home, without_proxy
from litellm_mlx.launcher.clients.client_setup import (
    KEY,
    MODEL,
    NAME,
    Endpoint,
    claude_environ,
    codex_config,
    openclaw_config,
    openclaw_file,
    opencode_config,
    pi_folder,
    pi_provider,
    qwen_environ,
    qwen_providers,
)
from litellm_mlx.launcher.clients.opencode_agents import (
    opencode_home,
    own_choice_fault,
)
from litellm_mlx.launcher.clients.user import User


@dataclass(frozen=True, slots=True)
class UserSettings:
    """
    A client's settings file.

    Args:
        keys: what it is to say, nested as there; None: it cannot be written.
        text: the same as a text for the user.
        why: it cannot be written.
    """

    path: Path
    keys: Mapping[str, Any] | None
    text: str
    why: str = "it may hold comments, which would be lost"


def _json(path: Path, keys: Mapping[str, Any]) -> UserSettings:
    return UserSettings(path, keys, _text(keys))


def _text(keys: Mapping[str, Any]) -> str:
    return json.dumps(keys, indent=2) + "\n"


def _claude(server: Endpoint, user: User) -> UserSettings:
    path = claude_home(user) / "settings.json"
    keys = {**claude_environ(server), **without_proxy(user, {})}
    return _json(path, {"env": keys})


def _pi(server: Endpoint, user: User) -> UserSettings:
    keys = {"providers": {NAME: pi_provider(server)}}
    return _json(pi_folder(user) / "models.json", keys)


def _opencode(server: Endpoint, user: User) -> UserSettings:
    folder = opencode_home(user)
    keys = opencode_config(server)
    commented = folder / "opencode.jsonc"
    if commented.exists():
        return UserSettings(commented, None, _text(keys))
    if why := own_choice_fault(user, NAME):
        return UserSettings(folder / "opencode.json", None, _text(keys), why)
    return _json(folder / "opencode.json", keys)


def _qwen(server: Endpoint, user: User) -> UserSettings:
    path = qwen_files.qwen_home(user) / "settings.json"
    keys: dict[str, Any] = {
        "env": qwen_environ(server),
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": MODEL},
    }
    if why := qwen_files.own_models_fault(user, MODEL):
        keys["modelProviders"] = qwen_providers(server)
        return UserSettings(path, None, _text(keys), why)
    return _json(path, keys)


def _codex(server: Endpoint, user: User) -> UserSettings:
    named = user.environ.get("CODEX_HOME")
    folder = Path(named) if named else user.home / ".codex"
    values = {"model": f'"{MODEL}"', **codex_config(server)}
    lines = [f"{name} = {value}" for name, value in values.items()]
    hint = f"# Above the first table; {KEY} must stand in the editor's environment."
    return UserSettings(folder / "config.toml", None, "\n".join([hint, *lines, ""]))


def _openclaw(server: Endpoint, user: User) -> UserSettings:
    return UserSettings(openclaw_file(user), None, _text(openclaw_config(server)))


SETTINGS: Mapping[str, Callable[[Endpoint, User], UserSettings]] = {
    "claude": _claude,
    "openclaw": _openclaw,
    "pi": _pi,
    "codex": _codex,
    "opencode": _opencode,
    "qwen": _qwen,
}
