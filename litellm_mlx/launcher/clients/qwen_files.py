"""
What Qwen Code's settings and agents name besides the local model.

It joins the objects of its files: of the machine, the user and the project. So a
provider of the user's stays beside ours unless our file names it as well, and a model
of it that is called as ours, or an agent's own model, is asked instead.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients.opencode_agents import in_markdown
from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import user_json

MACHINE = "QWEN_CODE_SYSTEM_SETTINGS_PATH"
DEFAULTS = "QWEN_CODE_SYSTEM_DEFAULTS_PATH"
_DEFAULTS_NAME = "system-defaults.json"
# It knows these without being told of them.
_PROVIDERS = ("openai-responses", "anthropic", "gemini", "vertex-ai", "qwen-oauth")
# What its agents could ask another provider with, were there no settings of it.
_OTHERS_KEYS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "GEMINI_API_KEY",
                "GOOGLE_API_KEY")  # fmt: skip


def qwen_home(user: User) -> Path:
    """Where Qwen Code keeps its user's files."""
    named = user.environ.get("QWEN_HOME")
    return Path(named) if named else user.home / ".qwen"


def machine_file(user: User) -> Path:
    """The settings that hold for all users, and beat theirs."""
    if named := user.environ.get(MACHINE):
        return Path(named)
    if sys.platform == "darwin":
        return Path("/Library/Application Support/QwenCode/settings.json")
    return Path("/etc/qwen-code/settings.json")


def defaults_file(user: User) -> Path:
    """The settings that all others beat."""
    named = user.environ.get(DEFAULTS)
    return Path(named) if named else machine_file(user).with_name(_DEFAULTS_NAME)


def other_providers(user: User) -> list[str]:
    """
    Names of the providers that its files or itself know.

    Raises:
        Unreadable: a file of settings cannot be read.
    """
    found = dict.fromkeys(_PROVIDERS)
    for said in _settings(user):
        for name in ("modelProviders", "providerProtocol"):
            named = said.get(name)
            found |= dict.fromkeys(named if isinstance(named, dict) else ())
    found.pop("openai", None)
    return list(found)


def names_model(settings: Mapping[str, Any], model: str) -> bool:
    """Whether a provider in settings has a model of that name."""
    providers = settings.get("modelProviders")
    rows = providers.values() if isinstance(providers, dict) else ()
    models = [one for row in rows if isinstance(row, list) for one in row]
    return any(
        model in (one.get("id"), one.get("name"))
        for one in models
        if isinstance(one, dict)
    )


def others_keys(user: User) -> Mapping[str, str]:
    """Keys of other providers, taken away where an agent has a model of its own."""
    folders = (qwen_home(user) / "agents", Path.cwd() / ".qwen/agents")
    if not any(name for folder in folders for name in in_markdown(folder)):
        return {}
    return dict.fromkeys(_OTHERS_KEYS, "")


def _settings(user: User) -> Iterator[dict[str, Any]]:
    files = (
        defaults_file(user),
        qwen_home(user) / "settings.json",
        Path.cwd() / ".qwen/settings.json",
        machine_file(user),
    )
    for file in dict.fromkeys(files):
        yield user_json(file)
