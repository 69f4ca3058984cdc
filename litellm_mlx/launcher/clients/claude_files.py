"""
What Claude Code's settings say of proxies.

Their `env` blocks beat the environment that it is started in. A proxy there would be
sent the prompts, in clear, unless a block that beats them exempts this machine.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import readable_json

_EXEMPTING = ("NO_PROXY", "no_proxy")
_THIS_MACHINE = "127.0.0.1,localhost"


def claude_home(user: User) -> Path:
    """Where Claude Code keeps its user's files."""
    named = user.environ.get("CLAUDE_CONFIG_DIR")
    return Path(named) if named else user.home / ".claude"


def without_proxy(user: User, given: Mapping[str, Any]) -> Mapping[str, str]:
    """
    What an `env` block must say so that no proxy sees what is said on this machine.

    Args:
        given: the settings that the user gives on the command line.
    """
    said = [value for block in _blocks(user, given) for value in _exempted(block)]
    own = [user.environ.get(name, "") for name in _EXEMPTING]
    hosts = dict.fromkeys(filter(None, [*said, *own, _THIS_MACHINE]))
    return dict.fromkeys(_EXEMPTING, ",".join(hosts))


def _blocks(user: User, given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    own, project = claude_home(user), Path.cwd() / ".claude"
    files = (own / "settings.json", project / "settings.json",
             project / "settings.local.json")  # fmt: skip
    for said in (*map(readable_json, files), given):
        block = said.get("env")
        if isinstance(block, dict):
            yield block


def _exempted(block: Mapping[str, Any]) -> Iterator[str]:
    for name in _EXEMPTING:
        value = block.get(name)
        if isinstance(value, str):
            yield value
