"""JSON bodies as clients write them, and as all of them can read them."""

import json
import re
from typing import Any

import orjson

_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"%s|(?P<half>%s)|\\." % (_PAIR, _HALF), re.DOTALL)


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
        whole = _ESCAPES.sub(_whole, body)
        if whole == body:
            raise
        return orjson.loads(whole)


def dump_bytes(value: Any) -> bytes:
    """Print a value; integers beyond 64 bits and half surrogate pairs, too."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _whole(escape: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if escape["half"] else escape[0]
