"""
Agents that stand in files of Markdown, each with settings at its head.

opencode and Qwen Code read them as gray-matter does: a line of three dashes, with the
name of a format behind it or not, then settings until the next such line, or the end.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_HEAD = re.compile(
    r"\A---(?!-)([^\r\n]*)\r?\n(.*?)(?:^---|\Z)", re.DOTALL | re.MULTILINE
)
_MAX_CHARS = 1 << 24
_MAX_FILES = 10_000  # below a folder of agents; a link may lead into itself


@dataclass(frozen=True, slots=True)
class AgentFile:
    """
    A file of an agent.

    Args:
        path: its own. name: by its place in the folder of agents.
        said: its settings; a head that cannot be understood is all of it its model,
            for it may name one.
    """

    path: Path
    name: str
    said: Mapping[str, Any]

    @property
    def names(self) -> set[str]:
        """What the agent may be called: a name in its head beats its place."""
        own = self.said.get("name")
        return {self.name, own} if isinstance(own, str) and own else {self.name}


def agent_files(folder: Path) -> Iterator[AgentFile]:
    """The agents of a folder whose heads name a model."""
    num_left = _MAX_FILES
    for place, _, names in os.walk(folder, followlinks=True):
        num_left -= len(names) + 1
        if num_left < 0:
            return
        for name in names:
            file = Path(place, name)
            if file.suffix != ".md" or not file.is_file():
                continue
            if (said := _settings(file)).get("model"):
                path = file.relative_to(folder).with_suffix("")
                yield AgentFile(file, path.as_posix(), said)


def _settings(file: Path) -> Mapping[str, Any]:
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as text:
            head = _HEAD.match(text.read(_MAX_CHARS))
    except OSError:
        return {}  # its client says so itself
    if head is None:
        return {}
    read = json.loads if head[1].strip().lower() == "json" else yaml.safe_load
    try:
        said = read(head[2])
    except (ValueError, yaml.YAMLError, RecursionError):
        said = {"model": head[2]} if "model" in head[2] else {}
    return said if isinstance(said, dict) else {}
