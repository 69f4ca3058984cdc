"""
Agents of opencode's user that have a model of their own.

Each would start on that model, whatever `model` says: in opencode's settings (of the
user, of the project and the folders above it), or at the head of a file of Markdown.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients.agent_files import agent_files
from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import Unreadable, user_json

_FILES = ("opencode.json", "opencode.jsonc")
_KINDS = ("agent", "mode")  # in settings: `mode` wins; folders may have a plural
_MANAGED = "OPENCODE_TEST_MANAGED_CONFIG_DIR"  # as opencode's own tests name it
_CHOOSING = ("model", "small_model", "provider", *_KINDS, "enabled_providers",
             "disabled_providers")  # fmt: skip
_Agents = dict[str, set[str]]


def opencode_home(user: User) -> Path:
    """Where opencode keeps its user's settings."""
    named = user.environ.get("XDG_CONFIG_HOME")
    return (Path(named) if named else user.home / ".config") / "opencode"


def opencode_settings(user: User, said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """
    All that says how opencode is to be.

    Args:
        said: what the user's own OPENCODE_CONFIG_CONTENT says.
    Raises:
        Unreadable: a file of settings cannot be read.
    """
    folders = dict.fromkeys(_folders(user))
    files = [folder / name for folder in folders for name in _FILES]
    files.append(opencode_home(user) / "config.json")
    if named := user.environ.get("OPENCODE_CONFIG"):
        files.append(Path(named))
    return [said, *map(user_json, files)]


def require_unmanaged(user: User) -> None:
    """
    Refuse settings of the machine's owner that choose a model: they beat ours.

    Raises:
        Unreadable: there are; names their file.
    """
    default = "/etc/opencode"
    if sys.platform == "darwin":
        default = "/Library/Application Support/opencode"
    folder = Path(user.environ.get(_MANAGED) or default)
    for file in (folder / name for name in _FILES):
        if chosen := [name for name in _CHOOSING if name in user_json(file)]:
            raise Unreadable(
                f"{file} says what {chosen[0]} is, and beats whatever is said here: "
                "start opencode without litellm-mlx launch"
            )


def own_choice_fault(user: User, provider: str) -> str | None:
    """Why what is written into its settings would not act; None: it would."""
    settings = opencode_settings(user, {})
    written = user_json(opencode_home(user) / _FILES[0])
    if agents := opencode_agents(user, settings):
        names = ", ".join(sorted({name for each in agents.values() for name in each}))
        return f"agents of yours have a model of their own ({names})"
    for said in settings:
        model = str(said.get("model") or provider)
        if model.partition("/")[0] != provider and said != written:
            return f"another of its files says that the model is {model}"
        if provider in (said.get("disabled_providers") or ()):
            return f"disabled_providers names {provider}"
        if provider not in (said.get("enabled_providers") or (provider,)):
            return f"enabled_providers does not name {provider}"
    return None


def opencode_agents(
    user: User, settings: Sequence[Mapping[str, Any]]
) -> Mapping[str, list[str]]:
    """Their names, as `agent` and as `mode`."""
    found: _Agents = {kind: set() for kind in _KINDS}
    for said in settings:
        _take(found, said)
    for folder in dict.fromkeys(_folders(user)):
        for kind in _KINDS:
            for name in (kind, f"{kind}s"):
                for file in agent_files(folder / name):
                    found["agent"] |= file.names
    return {kind: sorted(names) for kind, names in found.items() if names}


def opencode_providers(
    settings: Sequence[Mapping[str, Any]], name: str
) -> Mapping[str, list[str]]:
    """
    The lists of providers that are on and off, so that one of a name is on.

    Returns:
        Those lists alone that the user's settings have.
    """
    found: dict[str, list[str]] = {}
    for said in settings:
        for kind in ("enabled_providers", "disabled_providers"):
            listed = said.get(kind)
            if isinstance(listed, list):
                found.setdefault(kind, []).extend(one for one in listed if one != name)
    if "enabled_providers" in found:
        found["enabled_providers"].append(name)
    return found


def _folders(user: User) -> Iterator[Path]:
    yield opencode_home(user)
    yield user.home / ".opencode"
    if own := user.environ.get("OPENCODE_CONFIG_DIR"):
        yield Path(own)
    said = Path(user.environ.get("PWD") or ".")  # where it thinks that it is
    here = [said] if said.is_dir() else []
    for project in (Path.cwd(), *here, *_named_folders(user)):
        for folder in (project, *project.parents):
            yield folder
            yield folder / ".opencode"


def _named_folders(user: User) -> Iterator[Path]:
    """Projects that its arguments may name."""
    for word in user.arguments:
        path = Path(word.rpartition("=")[2] or ".")
        if len(str(path)) < os.pathconf("/", "PC_PATH_MAX") and path.is_dir():
            yield path.resolve()


def _take(found: _Agents, said: Mapping[str, Any]) -> None:
    for kind in _KINDS:
        agents = said.get(kind)
        for name, agent in agents.items() if isinstance(agents, dict) else ():
            if isinstance(agent, dict) and agent.get("model"):
                found[kind].add(name)
