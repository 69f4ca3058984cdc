"""
What a user's OpenClaw file says, with what it includes, and without models of agents.

OpenClaw's rules: `$include` names a file or several, from the folder of the file that
says so; what stands beside it wins; objects are merged and lists joined.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients.user_files import Unreadable, user_json

_MAX_DEPTH = 10
_INCLUDE = "$include"
_OF_AGENT = ("subagents", "heartbeat", "compaction")  # which name models as well


def openclaw_said(file: Path) -> dict[str, Any]:
    """
    The whole of it.

    Raises:
        Unreadable: a file cannot be read, or includes itself.
    """
    said = _included(user_json(file), file.parent, 0)
    return said if isinstance(said, dict) else {}


def without_models(said: Mapping[str, Any]) -> dict[str, Any]:
    """The same, in which no agent names a model."""
    agents = said.get("agents")
    if not isinstance(agents, dict):
        return dict(said)
    left = {name: _without_model(value) for name, value in agents.items()}
    if isinstance(entries := agents.get("entries"), dict):
        left["entries"] = {name: _without_model(one) for name, one in entries.items()}
    return {**said, "agents": left}


def _included(value: Any, folder: Path, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise Unreadable(f"files of {folder} include each other")
    if isinstance(value, list):
        return [_included(each, folder, depth) for each in value]
    if not isinstance(value, dict):
        return value
    rest = {
        name: _included(each, folder, depth)
        for name, each in value.items()
        if name != _INCLUDE
    }
    named = value.get(_INCLUDE, [])
    found: dict[str, Any] = {}
    for name in [named] if isinstance(named, str) else named:
        file = folder / str(name)
        found = _joined(found, _included(user_json(file), file.parent, depth + 1))
    return _joined(found, rest)


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *other]
    if isinstance(one, dict) and isinstance(other, dict):
        both = {name: _joined(one[name], other[name]) for name in one if name in other}
        return {**one, **other, **both}
    return other


def _without_model(agent: Any) -> Any:
    """An agent, a list of them, or what all have in common."""
    if isinstance(agent, list):
        return [*map(_without_model, agent)]
    if not isinstance(agent, dict):
        return agent
    rest = {name: value for name, value in agent.items() if name != "model"}
    for name in _OF_AGENT:
        if isinstance(inner := rest.get(name), dict):
            rest[name] = {key: each for key, each in inner.items() if key != "model"}
    return rest
