"""Misspelt settings: names in the environment that nobody reads, with likely ones."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import parse_stream

from sidecar.config.reasons import REASONS, reason_of
from sidecar.config.settings import SECTIONS
from sidecar.config.sources import spellings

# What others read, and people keep in the same file.
_OTHERS = (
    "LITELLM_*",
    "HF_*",
    "OTEL_*",
    "OPENAI_*",
    "ANTHROPIC_*",
    "AZURE_*",
    "AWS_*",
    "GOOGLE_*",
    "VERTEX_*",
    "LANGFUSE_*",
    "REDIS_*",
    "*_API_KEY",
    "*_API_BASE",
    "DATABASE_URL",
    "NO_PROXY",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "PYTHON*",
    "CUDA_*",
    "TRANSFORMERS_*",
    "TOKENIZERS_*",
    "MLX_METAL_*",
    "MLX_MAX_*",
    "MLX_CUDA_*",
    "MLX_ENABLE_*",
    "*_COLOR",
    "PATH",
)
_OUR_PREFIXES = ("MLX_SERVER_", "EXO_KV_")
_SIMILAR = 0.7
_ALL_BUT_EQUAL = 0.9  # a letter too many, one missing, two in the wrong order
_SHORTEST = 8  # names of the environment below this are too often alike


@dataclass(frozen=True, slots=True)
class UnknownName:
    """
    A name that has no effect.

    Args:
        meant: the known name most like it, None if none is.
    """

    name: str
    source: str
    meant: str | None

    def __str__(self) -> str:
        if reason := reason_of(self.name):
            return f"{self.name} in {self.source} has no effect: {reason}"
        hint = f": did you mean {self.meant}?" if self.meant else ", it has no effect"
        return f"unknown setting {self.name} in {self.source}{hint}"


def known_names() -> set[str]:
    """All spellings of all settings, whoever reads them."""
    items = (item for section in SECTIONS for item in dataclasses.fields(section))
    return {name for item in items for name in spellings(item)}


def unread_lines(env_file: Path) -> list[int]:
    """Lines of `.env` that are no NAME=value, or whose quote does not end."""
    if not env_file.is_file():
        return []
    with env_file.open(encoding="utf-8", errors="replace") as text:
        return [one.original.line for one in parse_stream(text) if one.error]


def unknown_names(env_file: Path, environ: Mapping[str, str]) -> list[UnknownName]:
    """
    Names that were probably meant as settings.

    `.env` is ours: each name in it that is not known, nor as others' names are, nor
    used by a LiteLLM config beside it. Of the environment only what can hardly mean
    anything else.
    """
    known = known_names()
    in_file = [name for name in dotenv_values(env_file) if name not in known]
    used = _names_in_configs(env_file.parent)
    found = [
        UnknownName(name, str(env_file), _meant(name, known, _SIMILAR))
        for name in in_file
        if reason_of(name)
        or _nearest(name, known, _ALL_BUT_EQUAL)
        or not (name in used or _is_others(name))
    ]
    for name in sorted(set(environ) - known - set(in_file)):
        meant = _meant(name, known, _ALL_BUT_EQUAL) if len(name) >= _SHORTEST else ""
        if meant or name in REASONS or name.startswith(_OUR_PREFIXES):
            meant = meant or _meant(name, known, _SIMILAR)
            found.append(UnknownName(name, "the environment", meant))
    return found


def _meant(name: str, known: Iterable[str], likeness: float) -> str | None:
    """None for a name that is known to do nothing: no other was meant."""
    return None if reason_of(name) else _nearest(name, known, likeness)


def _nearest(name: str, known: Iterable[str], likeness: float) -> str | None:
    # Sorted: of two that are equally near the same one is named each time.
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=likeness)
    return close[0] if close else None


def _is_others(name: str) -> bool:
    return any(fnmatchcase(name.upper(), pattern) for pattern in _OTHERS)


def _names_in_configs(folder: Path) -> set[str]:
    """`os.environ/NAME`, as LiteLLM's configs refer to a variable."""
    names: set[str] = set()
    for config in [*folder.glob("*.yaml"), *folder.glob("*.yml")]:
        names.update(re.findall(r"os\.environ/(\w+)", _text_of(config)))
    return names


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
