"""
Agents of opencode's user that have a model of their own.

Each would start on that model, whatever `model` says: in opencode's settings (of the
user, of the project and the folders above it), or at the head of a file of Markdown.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import user_json

_FILES = ("opencode.json", "opencode.jsonc")
_KINDS = ("agent", "mode")  # in settings: `mode` wins; folders may have a plural
_HEAD = re.compile(r"\A---\r?\n(.*?)^---", re.DOTALL | re.MULTILINE)
_MODEL = re.compile(r"^\W*model\W*:", re.MULTILINE)
_MAX_HEAD = 1 << 16
_MAX_FILES = 10_000  # below a folder of agents; a link may lead into itself
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
                found["agent"].update(in_markdown(folder / name))
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
    for project in (Path.cwd(), *_named_folders(user)):
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


def in_markdown(folder: Path) -> Iterator[str]:
    """Agents of a folder's Markdown files whose heads name a model, by their paths."""
    num_left = _MAX_FILES
    for place, _, names in os.walk(folder, followlinks=True):
        num_left -= len(names) + 1
        if num_left < 0:
            return
        for name in names:
            file = Path(place, name)
            if file.suffix == ".md" and file.is_file() and _has_model(file):
                yield file.relative_to(folder).with_suffix("").as_posix()


def head_of(file: Path) -> str:
    """What stands between the two lines at the head of a file; "": nothing."""
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as text:
            head = _HEAD.match(text.read(_MAX_HEAD))
    except OSError:
        return ""  # its client says so itself
    return head[1] if head else ""


def _has_model(file: Path) -> bool:
    head = head_of(file)
    try:
        said = yaml.safe_load(head)
    except (yaml.YAMLError, RecursionError):
        return bool(_MODEL.search(head))
    return isinstance(said, dict) and bool(said.get("model"))
