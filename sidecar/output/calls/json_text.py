"""
JSON that a model writes, read as it comes and printed anew as `json.dumps` would.

So each piece that was printed is the beginning of a JSON text, whatever follows. Models
write line breaks within strings, Python's quotes and constants, and backslashes before
letters that JSON does not know: all that has one meaning only, and is read as that.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from sidecar.core.json_bytes import MAX_LEVELS, load_json
from sidecar.output.calls.scanner import NotThisFormat, Scanner, Wait

Print = Callable[[str], None]

_DIGITS = tuple("-0123456789")
_WORD = re.compile(r"[A-Za-z]*")
_NUMBER = re.compile(r"[-+.0-9A-Za-z]*")
_CONSTANTS = {
    "true": "true", "false": "false", "null": "null",
    "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_SPECIAL = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_HEX = re.compile("[0-9a-fA-F]{4}")
_REPLACEMENT = "\ufffd"


def read_value(scan: Scanner, show: Print, level: int = 0) -> Wait[None]:
    """
    Read one value.

    Args:
        show: is given its text in pieces: strings as they come, all else when it is
            complete.
    """
    if level > MAX_LEVELS:
        raise NotThisFormat("nested too deep")
    first = yield from scan.space()
    if first == "{":
        yield from read_object(scan, show, level)
    elif first == "[":
        value = partial(read_value, scan, show, level + 1)
        yield from read_members(scan, show, "[]", value)
    elif first and first in _SPECIAL:
        yield from read_string(scan, show)
    else:
        yield from _read_word(scan, show, _NUMBER if first in _DIGITS else _WORD)


def _read_word(scan: Scanner, show: Print, kind: re.Pattern[str]) -> Wait[None]:
    """Read a number or a constant; what is none is not taken."""
    word = yield from scan.run(kind)
    try:
        yield from scan.following()
        show(_number(word) if kind is _NUMBER else _CONSTANTS[word])
    except (NotThisFormat, KeyError):
        scan.at -= len(word)
        raise NotThisFormat("no JSON value") from None


def read_object(scan: Scanner, show: Print, level: int = 0) -> Wait[None]:
    """Read an object."""
    yield from read_members(scan, show, "{}", partial(_member, scan, show, level + 1))


def read_members(
    scan: Scanner, show: Print, brackets: str, member: Callable[[], Wait[None]]
) -> Wait[None]:
    """
    Read what stands between two brackets, with commas between.

    Args:
        member: reads one of them.
    """
    yield from scan.expect(brackets[0])
    show(brackets[0])
    between = ""
    while (yield from scan.space()) != brackets[1]:
        if between:
            yield from scan.expect(",")
            show(between)
        yield from member()
        between = ", "
    scan.at += 1
    show(brackets[1])


def _member(scan: Scanner, show: Print, level: int) -> Wait[None]:
    yield from scan.space()
    yield from read_string(scan, show)
    yield from scan.space()
    yield from scan.expect(":")
    show(": ")
    yield from read_value(scan, show, level)


def read_string(scan: Scanner, show: Print) -> Wait[None]:
    """Read a string."""
    quote = yield from scan.following()
    if quote not in _SPECIAL:
        raise NotThisFormat("no JSON string")
    scan.at += 1
    show('"')
    special = _SPECIAL[quote]
    while True:
        found = special.search(scan.text, scan.at)
        end = found.start() if found else len(scan.text)
        show(escaped(scan.text[scan.at : end]))
        scan.at = end
        if found is None:
            scan.drop()
            yield from scan.more()
        elif found.group() == "\\":
            show(escaped((yield from _escape(scan))))
        else:
            scan.at += 1
            show('"')
            return


def read_text(scan: Scanner) -> Wait[str]:
    """Read a string, and what it says."""
    pieces: list[str] = []
    yield from read_string(scan, pieces.append)
    return str(json.loads("".join(pieces)))


def collected(scan: Scanner) -> Wait[str]:
    """Read one value, and give its text whole."""
    pieces: list[str] = []
    yield from read_value(scan, pieces.append)
    return "".join(pieces)


def escaped(text: str) -> str:
    """A text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def printed(value: Any) -> str:
    """
    A value as JSON; half a surrogate pair, which has no UTF-8, as U+FFFD.

    Raises:
        NotThisFormat: JSON has no such value, or it is nested beyond reason.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        load_json(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotThisFormat(str(error)) from None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def object_of(text: str) -> dict[str, Any]:
    """
    The object that a whole text is; an empty one is an empty object.

    Raises:
        NotThisFormat: it is none.
    """
    value = value_of(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise NotThisFormat("arguments must be an object")
    return value


def value_of(text: str) -> Any:
    """
    The value that a whole text is.

    Raises:
        NotThisFormat: it is none, or one that JSON's readers do not take.
    """
    options = {"parse_constant": _no_constant, "parse_float": _finite}
    try:
        return load_json(text, **options, strict=False)
    except ValueError as error:
        raise NotThisFormat(str(error)) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")  # Python's parser takes NaN and Infinity


def _finite(text: str) -> float:
    value = float(text)
    if value in (math.inf, -math.inf):
        raise ValueError("a number too large for JSON's readers")
    return value


def _number(text: str) -> str:
    """A number as it is written: as a float it would lose digits."""
    value_of(text)
    return text


def _escape(scan: Scanner) -> Wait[str]:
    """What a backslash and what follows it stand for; what is none is not taken."""
    start = scan.at
    try:
        return (yield from _escaped_char(scan))
    except NotThisFormat:
        scan.at = start
        raise


def _escaped_char(scan: Scanner) -> Wait[str]:
    scan.at += 1
    letter = yield from scan.char()
    if letter == "u":
        return (yield from _unicode(scan))
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    return letter if letter in "\"'\\/" else f"\\{letter}"


def _unicode(scan: Scanner) -> Wait[str]:
    unit = yield from _unit(scan)
    if 0xDC00 <= unit < 0xE000:
        return _REPLACEMENT
    if not 0xD800 <= unit < 0xDC00:
        return chr(unit)
    start = scan.at
    if not (yield from scan.take("\\u")):
        return _REPLACEMENT
    low = yield from _unit(scan)
    if not 0xDC00 <= low < 0xE000:
        scan.at = start
        return _REPLACEMENT
    return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))


def _unit(scan: Scanner) -> Wait[int]:
    while len(scan.text) < scan.at + 4:
        yield from scan.more()
    digits = scan.text[scan.at : scan.at + 4]
    if not _HEX.fullmatch(digits):
        raise NotThisFormat("no Unicode escape")
    scan.at += 4
    return int(digits, 16)


def joined_object(members: Collection[tuple[str, str]]) -> str:
    """An object of names and values that are JSON already."""
    inside = ", ".join(f"{printed(name)}: {value}" for name, value in members)
    return f"{{{inside}}}"
