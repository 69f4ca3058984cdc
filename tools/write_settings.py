"""
Writes `.env.example` and `docs/settings.md` from sidecar/config/settings.py.

    python -m tools.write_settings
"""

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidecar.config.settings import SECTIONS
from sidecar.config.sources import spellings

REPO = Path(__file__).parents[1]
_WIDTH = 88
_HEAD = """\
# All settings. Copied to .env at the first start; a variable in the process environment
# beats its line here (ENV_FILE_OVERRIDES=true turns that round). All lines are
# optional: what is commented out shows the default; nothing behind the = means that
# the comment says it. Each name also works with MLX_SERVER_ before it. Sizes are bytes,
# 8GB, or 25% of the memory. A misspelt name is warned about at the start.
# Made from sidecar/config/settings.py by `python -m tools.write_settings`.
"""
# Behind a setting's line, for those who choose.
_BEHIND = {
    "MODEL_PATH": """\
# Three good choices for agents:
#   MODEL_PATH=lmstudio-community/GLM-4.7-Flash-MLX-4bit
#   MODEL_PATH=lmstudio-community/Qwen3-Coder-30B-A3B-Instruct-MLX-4bit
#   MODEL_PATH=mlx-community/Qwen3-4B-Instruct-2507-4bit
""",
    "LITELLM_MASTER_KEY": """\
# For a cloud model in litellm_config.yaml.
# ANTHROPIC_API_KEY=
""",
}
_PAGE = """\
# Settings

Every setting is an environment variable and may stand in `.env` (`.env.example` has
them all). Later wins: the default, `.env`, the process environment, a flag;
`ENV_FILE_OVERRIDES=true` lets `.env` beat the environment. Each name also works with
`MLX_SERVER_` before it. A value out of its range stops the start and names the range; a
name in `.env` that nobody reads is warned about, with the nearest one, or with the
reason why it does nothing here.

Sizes are bytes, a number with `KB`, `MB`, `GB` or `TB` (of 1024), or a share of the
machine's memory (`25%`).

This page is made from `sidecar/config/settings.py` by `python -m tools.write_settings`.
"""


def env_example() -> str:
    """The text of `.env.example`: all lines are comments, or empty."""
    parts = [_HEAD]
    for section in SECTIONS:
        title = f"# --- {_title(section)} "
        parts.append(f"\n{title.ljust(_WIDTH - 1, '-')}\n")
        for item in _items(section):
            name = item.metadata["env"]
            parts.append(f"{_comment(item)}# {name}={_written(item)}\n")
            parts.append(_BEHIND.get(name, ""))
    return "".join(parts)


def settings_page() -> str:
    """The text of `docs/settings.md`: a table for each section."""
    parts = [_PAGE]
    for section in SECTIONS:
        parts.append(f"\n## {_title(section)}\n\n")
        parts.append("| variable | default | takes | meaning |\n|---|---|---|---|\n")
        parts += [_row(item) for item in _items(section)]
    return "".join(parts)


def main() -> None:
    """Write both files."""
    (REPO / ".env.example").write_text(env_example())
    (REPO / "docs" / "settings.md").write_text(settings_page())


def _title(section: type) -> str:
    return str(section.__doc__)


def _items(section: type[Any]) -> Iterator[Any]:
    return (item for item in dataclasses.fields(section) if item.metadata["help"])


def _comment(item: Any) -> str:
    shown, takes = item.metadata["shown"], item.metadata["kind"].range
    text = item.metadata["help"]
    if takes.startswith(("one of", "a JSON", "a comma list")):
        text += f" Takes {takes}."
    if shown:
        text += f" Default: {shown}."
    lines = textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def _row(item: Any) -> str:
    meta = item.metadata
    first, *older = spellings(item)[:-1]
    also = f" Also {', '.join(f'`{name}`' for name in older)}." if older else ""
    default = meta["shown"] or f"`{_written(item)}`"
    return f"| `{first}` | {default} | {meta['kind'].range} | {meta['help']}{also} |\n"


def _written(item: Any) -> str:
    """A default as it would be written; empty if it is in words."""
    if item.metadata["shown"]:
        return ""
    value = (
        item.default_factory() if item.default is dataclasses.MISSING else item.default
    )
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    main()
