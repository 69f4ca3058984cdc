"""Parsers of settings: text -> value; ValueError says the range in words."""

import json
import os
from collections.abc import Callable

_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def boolean(text: str) -> bool:
    """`1 true yes on` or `0 false no off`, any case."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


def number(low: float, high: float) -> Callable[[str], float]:
    """A number in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"a number {low:g}..{high:g}") from None
        if not low <= value <= high:
            raise ValueError(f"a number {low:g}..{high:g}")
        return value

    return parse


def integer(low: int, high: int) -> Callable[[str], int]:
    """A whole number in [low, high]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"a whole number {low}..{high}") from None
        if not low <= value <= high:
            raise ValueError(f"a whole number {low}..{high}")
        return value

    return parse


def choice(*words: str) -> Callable[[str], str]:
    """One of the given words, any case."""

    def parse(text: str) -> str:
        for word in words:
            if text.strip().lower() == word.lower():
                return word
        raise ValueError("one of " + ", ".join(words))

    return parse


def size(text: str) -> int:
    """Bytes: a number, `64GB`, or a share of this machine's memory (`80%`)."""
    try:
        value = _size(text.strip().upper())
    except (ValueError, OverflowError):
        value = -1
    if value < 0:
        raise ValueError("bytes, a size such as 64GB, or a share such as 80%")
    return value


def place(text: str) -> str:
    """A path; `~` is the home folder."""
    return os.path.expanduser(text.strip())


def words(text: str) -> tuple[str, ...]:
    """A comma list, or a JSON list of strings."""
    if text.strip().startswith("["):
        try:
            value = json.loads(text)
        except ValueError:
            value = [None]
        if not all(isinstance(item, str) for item in value):
            raise ValueError("a comma list or a JSON list of strings")
        return tuple(value)
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _size(word: str) -> int:
    if word.endswith("%"):
        return int(physical_memory() * float(word[:-1]) / 100)
    for unit, factor in _UNITS.items():
        if word.endswith(unit):
            return int(float(word.removesuffix(unit)) * factor)
    return int(word)


def physical_memory() -> int:
    """Bytes of RAM in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def policy(text: str) -> dict[str, str]:
    """A JSON object of strings."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not all(
        isinstance(item, str) for item in value.values()
    ):
        raise ValueError("a JSON object, kind -> stop, pin or restate")
    return value
