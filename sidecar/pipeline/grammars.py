"""Grammars of one-line values: text -> length of the value at its start, or 0."""

import re
from collections.abc import Callable

_MOST_CLOCK_CHARS = 64
_RUNTIME = re.compile(
    r"((?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+|n/a)(?=[ \t]*$|[ \t]+•)", re.IGNORECASE
)
_CLOCK_END = re.compile(r"\.(?=\s|$)|$")
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AaPp]\.?[Mm]\.?)?"
_ZONE = (
    r"(?:\s?(?:\(?(?:UTC|GMT|[A-Z]{2,5})\)?(?:[+-]\d{1,2}(?::?\d{2})?)?"
    r"|[+-]\d{2}:?\d{2}|Z|\([A-Za-z_]+/[A-Za-z_/]+\)))?"
)
_ISO = r"\d{4}-\d{2}-\d{2}(?:[T ]" + _TIME + r")?"
_DAY = r"(?:Mon|Tues?|Wednes|Thurs?|Fri|Satur|Sun|Wed|Thu|Sat)(?:day)?"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec)[a-z]*"
_DATE = (
    rf"(?:{_DAY},?\s+)?(?:{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?|\d{{1,2}}\s+{_MONTH})"
    r"(?:,?\s+\d{4})?"
)
_CLOCK = re.compile(
    rf"(?:{_ISO}|(?:{_DATE}|{_DAY})(?:,?\s*(?:-|at|@)?\s*{_TIME})?"
    rf"|(?:{_DAY},?\s+)?{_ISO}|{_TIME}){_ZONE}"
)


def _runtime_size(text: str) -> int:
    match = _RUNTIME.match(text)
    return match.end(1) if match else 0


def _clock_size(text: str) -> int:
    """Length of the longest beginning that is a time, up to `.` or the end."""
    text = text[: _MOST_CLOCK_CHARS + 1]
    for match in reversed([*_CLOCK_END.finditer(text)]):
        value = text[: match.start()].rstrip()
        if len(value) <= _MOST_CLOCK_CHARS and _CLOCK.fullmatch(value):
            return len(value)
    return 0


GRAMMARS: dict[str, Callable[[str], int]] = {
    "runtime": _runtime_size,
    "clock": _clock_size,
}
