"""JSON bodies as clients write them, and as all of them can read them."""

import json
import re
from typing import Any

import orjson

_HALVES = re.compile(  # each run of backslashes is looked at once
    rb"(?<!\\)(?P<slashes>\\++)u(?:(?P<high>[dD][89abAB][0-9a-fA-F]{2})"
    rb"(?P<low>\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[dD][c-fC-F][0-9a-fA-F]{2})"
)
_MOST_SIGNS = 500_000  # whole pairs, too; with more the body stays as it is


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
        whole = _HALVES.sub(_whole, body, count=_MOST_SIGNS)
        if whole == body:
            raise
        return orjson.loads(whole)


def dump_bytes(value: Any) -> bytes:
    """Print a value; integers beyond 64 bits and half surrogate pairs, too."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _whole(found: re.Match[bytes]) -> bytes:
    is_escape = len(found["slashes"]) % 2 == 1
    if is_escape:
        return found[0] if found["low"] else found["slashes"] + b"ufffd"
    if found["low"]:  # behind an escaped backslash, which is text as what follows it
        return found["slashes"] + b"u" + found["high"] + b"\\ufffd"
    return found[0]
