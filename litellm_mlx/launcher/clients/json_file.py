"""An object in a file of strict JSON: keys added to it, and taken out again."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients.user_files import Unreadable

_INDENT = re.compile(rb"^\{\s*?\n([ \t]+)")
_ABSENT = object()
_SECRET = re.compile(
    r'("[^"\n]*(?:key|token|secret|password|auth(?:orization)?)"\s*:\s*)'
    r'"(?:[^"\\]|\\.)+"',
    re.IGNORECASE,
)  # a string under such a name, that is not empty


def without_secrets(text: str) -> str:
    """JSON, or lines of it, to be shown: strings under names of secrets are masked."""
    return _SECRET.sub(r'\1"***"', text)


def parsed(data: bytes, path: Path) -> dict[str, Any]:
    """
    The object.

    Raises:
        Unreadable: it is no strict JSON, and would not be what it was once written: a
            comment, a name that stands twice.
    """
    try:
        text = data.decode()  # json would guess another encoding
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
        json.dumps(found, ensure_ascii=False, allow_nan=False, indent=1).encode()
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is no strict JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{path} must hold an object")
    return found


def printed(value: Mapping[str, Any], like: bytes) -> bytes:
    """The object as text, indented and ended as another text of it is."""
    found = _INDENT.match(like.lstrip())
    indent: str | int = found[1].decode() if found else 2
    end = "" if like and not like.endswith(b"\n") else "\n"
    is_ascii = bool(like) and like.isascii()  # else its characters are no escapes
    return (json.dumps(value, indent=indent, ensure_ascii=is_ascii) + end).encode()


def merged(value: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The object with keys set, nested ones beside their neighbours."""
    result = dict(value)
    for name, own in keys.items():
        before = result.get(name)
        if isinstance(own, Mapping) and isinstance(before, Mapping):
            result[name] = merged(before, own)
        else:
            result[name] = own
    return result


def without(
    value: Mapping[str, Any], keys: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """
    The object with keys as they were before, where they are still as they were set.

    Args:
        keys: what was set. before: the object before that.
    """
    result = dict(value)
    for name, own in keys.items():
        now, was = result.get(name, _ABSENT), before.get(name, _ABSENT)
        both = isinstance(own, Mapping) and isinstance(now, Mapping)
        if now != own and not both:
            continue  # somebody else's by now
        inner = was if isinstance(was, Mapping) else {}
        rest = without(now, own, inner) if both else {}
        if rest or (both and isinstance(was, Mapping)):
            result[name] = rest
        elif was is _ABSENT:
            del result[name]
        else:
            result[name] = was
    return result


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
