"""
What Qwen Code's settings and agents name besides the local model.

It joins the objects of its files: of the machine, the user and the project. So a
provider of the user's stays beside ours unless our file names it as well, and a model
of it that is called as ours, or an agent's own model, is asked instead.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from litellm_mlx.launcher.clients.agent_files import agent_files
from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import Unreadable, user_json

MACHINE = "QWEN_CODE_SYSTEM_SETTINGS_PATH"
DEFAULTS = "QWEN_CODE_SYSTEM_DEFAULTS_PATH"
_DEFAULTS_NAME = "system-defaults.json"
# It knows these without being told of them.
_PROVIDERS = ("openai-responses", "anthropic", "gemini", "vertex-ai", "qwen-oauth")
_NO_URL = ("qwen-oauth", "vertex-ai")  # whose address no variable says
_ENV_FILES = (".env", ".qwen/.env")  # in the user's home
_FOREIGN = re.compile(rf"\b({'|'.join(_NO_URL)})\s*:", re.IGNORECASE)


def qwen_home(user: User) -> Path:
    """Where Qwen Code keeps its user's files: it looks into his .env files as well."""
    named = user.environ.get("QWEN_HOME")
    for name in _ENV_FILES:
        named = named or _variable(user.home / name, "QWEN_HOME")
    if not named:
        return user.home / ".qwen"
    if named == "~" or named.startswith("~/"):
        return user.home / named[2:]
    return Path.cwd() / named


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


def own_models_fault(user: User, model: str) -> str | None:
    """Why what is written into its settings would not act; None: it would."""
    for said in _settings(user):
        if _names_model(said, model):
            return f"a model of yours is called {model}, and would be asked instead"
    for name in _ENV_FILES:
        if _variable(user.home / name, "OPENAI_BASE_URL"):
            return f"OPENAI_BASE_URL in ~/{name} beats what its settings say"
    return None


def _variable(file: Path, name: str) -> str | None:
    """What a file of variables says; None: nothing, or it cannot be read."""
    try:
        return dotenv_values(file).get(name) if file.is_file() else None
    except (OSError, ValueError):
        return None


def _names_model(settings: Mapping[str, Any], model: str) -> bool:
    """Whether a provider in settings has a model of that name."""
    providers = settings.get("modelProviders")
    rows = providers.values() if isinstance(providers, dict) else ()
    models = [
        one
        for row in rows
        for one in (row.get("models") if isinstance(row, dict) else row) or ()
    ]
    return any(
        model in (one.get("id"), one.get("name"))
        for one in models
        if isinstance(one, dict)
    )


def require_local_agents(user: User) -> None:
    """
    Refuse agents whose models no variable leads to the local server.

    Raises:
        Unreadable: there is one; names its file.
    """
    homes = (qwen_home(user), Path.cwd() / ".qwen")
    folders = [home / "agents" for home in homes]
    folders += [place for home in homes for place in home.glob("extensions/*/agents")]
    for folder in folders:
        for file in agent_files(folder):
            if found := _FOREIGN.search(str(file.said["model"])):
                raise Unreadable(
                    f"{file.path} has a model of {found[1]}, which would be sent what "
                    "is said; take the model out of it"
                )


def _settings(user: User) -> Iterator[dict[str, Any]]:
    files = (
        defaults_file(user),
        qwen_home(user) / "settings.json",
        Path.cwd() / ".qwen/settings.json",
        machine_file(user),
    )
    for file in dict.fromkeys(files):
        yield user_json(file)
