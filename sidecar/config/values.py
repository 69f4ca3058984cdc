"""Types of settings: a range in words, and text -> value."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_ALL = 100.0  # percent
BUILTIN = ("built-in", "builtin")  # MODEL_PATH: the small model that comes along
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class ValueType:
    """
    A kind of value.

    Args:
        range: in words, for people. read: text -> value, or any ValueError.
    """

    range: str
    read: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        """
        The value that a text says.

        Raises:
            ValueError: with the range.
        """
        try:
            return self.read(text)
        except (ValueError, OverflowError, RecursionError):
            raise ValueError(self.range) from None


def number(low: float, high: float) -> ValueType:
    """A number in [low, high]."""
    return ValueType(
        f"a number {low:g}..{high:g}", lambda t: _within(low, float(t), high)
    )


def integer(low: int, high: int) -> ValueType:
    """A whole number in [low, high]."""
    return ValueType(
        f"a whole number {low}..{high}", lambda t: _within(low, int(t), high)
    )


def choice(*words: str, also: tuple[str, ...] = ()) -> ValueType:
    """One of the given words, any case; `also` are older ones that no message names."""

    by_name = {word.lower(): word for word in (*words, *also)}

    def read(text: str) -> str:
        word = by_name.get(text.strip().lower())
        if word is None:
            raise ValueError
        return word

    return ValueType("one of " + ", ".join(words), read)


def physical_memory() -> int:
    """Bytes of RAM in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _within(low: float, value: Any, high: float) -> Any:
    if not low <= value <= high:
        raise ValueError
    return value


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES + _NO:
        raise ValueError
    return word in _YES


def _size(text: str) -> int:
    word = text.strip().upper().replace("IB", "B")  # GiB, as others write it
    if word.endswith("%"):
        share = _within(0.0, float(word[:-1]), _ALL)
        value = int(physical_memory() * share / _ALL)
    elif word[-2:] in _UNITS:
        value = int(float(word[:-2]) * _UNITS[word[-2:]])
    else:
        value = int(word)
    return int(_within(0, value, math.inf))


def _wired(text: str) -> int | str:
    word = text.strip().lower()
    if word == "weights":
        return word
    return 0 if word in _NO else _size(text)


def _words(text: str) -> tuple[str, ...]:
    if text.strip().startswith("["):
        value = json.loads(text)
        if not all(isinstance(item, str) for item in value):
            raise ValueError
        return tuple(value)
    return tuple(item.strip() for item in text.split(",") if item.strip())


# As browsers send them. `null` is any page that is shown within a sandboxed frame.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\x00-\x20/,*?#@\x7f-\U0010ffff]+", re.I)
_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,252}|\[[0-9a-f:.]+\]", re.IGNORECASE)


def _each(text: str, form: re.Pattern[str]) -> tuple[str, ...]:
    found = _words(text)
    if not all(form.fullmatch(word) for word in found):
        raise ValueError
    return tuple(word.lower() for word in found)


def _policy(text: str) -> dict[str, str]:
    value = json.loads(text)
    if not isinstance(value, dict) or not all(
        isinstance(item, str) for item in value.values()
    ):
        raise ValueError
    return value


def _model(text: str) -> str | None:
    word = text.strip()
    return None if word in BUILTIN else os.path.expanduser(word)


def _expanded(text: str) -> str:
    return os.path.expanduser(text.strip())


def _places(text: str) -> tuple[str, ...]:
    parts = (part.strip() for part in text.split(os.pathsep) if text.strip() != "none")
    return tuple(os.path.expanduser(part) for part in parts if part)


plain = ValueType("text", str)
model = ValueType("a hub id, a folder, or built-in", _model)
places = ValueType("paths with : between, or none; ~ is the home folder", _places)
place = ValueType("a path; ~ is the home folder", _expanded)
hub_or_folder = ValueType("a hub id or a folder; ~ is the home folder", _expanded)
boolean = ValueType("true or false", _boolean)
size = ValueType("bytes, a size such as 64GB, or a share such as 80%", _size)
process_size = ValueType(
    "1MB or more: bytes, a size such as 64GB, or a share such as 80%",
    lambda text: int(_within(1 << 20, _size(text), math.inf)),
)
wired = ValueType("off, weights, or a size such as 8GB", _wired)
words = ValueType("a comma list or a JSON list of strings", _words)
origins = ValueType(
    "origins such as https://chat.example, no * and no null: a comma list or a JSON "
    "list",
    lambda text: _each(text, _ORIGIN),
)
hosts = ValueType(
    "host names without a port, no *: a comma list or a JSON list",
    lambda text: _each(text, _HOST_NAME),
)
names = ValueType("a JSON object, name -> name", _policy)
policy = ValueType("a JSON object, kind -> stop, pin or restate", _policy)
