"""
Agents of opencode's user that have a model of their own.

Each would start on that model, whatever `model` says: in opencode's settings (of the
user, of the project and the folders above it), or at the head of a file of Markdown.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import user_json

_FILES = ("opencode.json", "opencode.jsonc")
_KINDS = ("agent", "mode")  # of settings; folders of Markdown have a plural as well
_HEAD = re.compile(r"\A---\n(.*?)^---", re.DOTALL | re.MULTILINE)
_MODEL = re.compile(r"^model\s*:", re.MULTILINE)
_MAX_HEAD = 1 << 16


def opencode_agents(user: User, project: Path | None = None) -> list[str]:
    """
    Their names.

    Args:
        project: where opencode is started; None: here.
    Raises:
        Unreadable: a file of settings cannot be read.
    """
    found = set[str]()
    for folder in _folders(user, project or Path.cwd()):
        for file in _FILES:
            found.update(_in_settings(folder / file))
        for kind in _KINDS:
            for name in (kind, f"{kind}s"):
                found.update(_in_markdown(folder / name))
    for named in (_home(user) / "config.json", user.environ.get("OPENCODE_CONFIG")):
        found.update(_in_settings(Path(named)) if named else ())
    return sorted(found)


def _folders(user: User, project: Path) -> Iterator[Path]:
    yield _home(user)
    yield user.home / ".opencode"
    if own := user.environ.get("OPENCODE_CONFIG_DIR"):
        yield Path(own)
    for folder in (project, *project.parents):
        yield folder
        yield folder / ".opencode"


def _home(user: User) -> Path:
    named = user.environ.get("XDG_CONFIG_HOME")
    return (Path(named) if named else user.home / ".config") / "opencode"


def _in_settings(file: Path) -> Iterator[str]:
    said = user_json(file)
    for kind in _KINDS:
        agents = said.get(kind)
        for name, agent in agents.items() if isinstance(agents, dict) else ():
            if isinstance(agent, dict) and agent.get("model"):
                yield name


def _in_markdown(folder: Path) -> Iterator[str]:
    for file in folder.glob("**/*.md"):
        with file.open(errors="replace") as text:
            head = _HEAD.match(text.read(_MAX_HEAD))
        if head and _MODEL.search(head[1]):
            yield file.relative_to(folder).with_suffix("").as_posix()
