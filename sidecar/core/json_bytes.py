"""JSON of clients: lone surrogates are mended, depth and size are bounded."""

import json
import re
from typing import Any

import orjson

# What prints a value again counts its own levels on top: orjson takes 254 in all,
# Python's encoder and chat templates some hundreds.
MAX_LEVELS = 100


def load_json(text: str, **options: Any) -> Any:
    """
    Parse JSON text; `options` are those of `json.loads`.

    Raises:
        ValueError: it is no JSON, or nested deeper than MAX_LEVELS.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deep") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """ValueError for lists and objects that are nested deeper than MAX_LEVELS."""
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError("nested too deep")


_HALVES = re.compile(  # each run of backslashes is looked at once
    rb"(?<!\\)(?P<slashes>\\++)u(?:(?P<high>[dD][89abAB][0-9a-fA-F]{2})"
    rb"(?P<low>\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[dD][c-fC-F][0-9a-fA-F]{2})"
)
_MAX_SIGNS = 500_000  # whole pairs, too; with more the body stays as it is


def load_bytes(body: bytes) -> Any:
    """
    Parse a body.

    RFC 8259 allows the escape of half a surrogate pair, and JavaScript writes it for a
    text that is cut in the middle of a sign; it has no UTF-8, so it is read as U+FFFD.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        whole = _HALVES.sub(_whole, body, count=_MAX_SIGNS)
        if whole == body:
            raise
        return orjson.loads(whole)


def dump_bytes(value: Any) -> bytes:
    """Print a value; integers beyond 64 bits and half surrogate pairs, too."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


# A reader that splits lines as `str.splitlines` does breaks an event at these.
_LINE_BREAKS = {
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
    "\u0085".encode(): rb"\u0085",
}


def dump_line(value: Any) -> bytes:
    """Print a value for an event stream: no line break of Unicode stands in it."""
    line = orjson.dumps(value)
    for sign, escape in _LINE_BREAKS.items():
        line = line.replace(sign, escape)
    return line


def _whole(found: re.Match[bytes]) -> bytes:
    is_escape = len(found["slashes"]) % 2 == 1
    if is_escape:
        return found[0] if found["low"] else found["slashes"] + b"ufffd"
    if found["low"]:  # behind an escaped backslash, which is text as what follows it
        return found["slashes"] + b"u" + found["high"] + b"\\ufffd"
    return found[0]
