"""For how long an answer may stand for its URL, as its headers say (RFC 9111, 4.2)."""

import math
import re
import time
from email.message import Message
from email.utils import parsedate_to_datetime

_MAX_AGE = re.compile(r'max-age\s*=\s*"?(\d{1,9})"?')
_NEVER = ("no-store", "no-cache")


def fresh_s(headers: Message) -> float:
    """
    Seconds from now; inf: the headers say nothing, and the caller decides.

    `must-revalidate` needs nothing: what is not fresh any more is always fetched anew.
    """
    said = ",".join(headers.get_all("Cache-Control") or ()).lower()
    directives = [one.strip() for one in said.split(",")]
    if any(one.partition("=")[0].strip() in _NEVER for one in directives):
        return 0.0
    ages = [one for one in directives if one.startswith("max-age")]
    if ages:
        found = [_MAX_AGE.fullmatch(one) for one in ages]
        lifetime = min(float(match[1]) if match else 0.0 for match in found)
    elif (expires := headers.get("Expires")) is not None:
        now = _seconds_of(headers.get("Date")) or time.time()
        lifetime = (_seconds_of(expires) or now) - now
    else:
        return math.inf
    return max(0.0, lifetime - _age_s(headers))


def _seconds_of(date: str | None) -> float | None:
    """Since the epoch; None: it is no date, as in `Expires: 0`."""
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, OverflowError):
        return None


def _age_s(headers: Message) -> float:
    age = (headers.get("Age") or "").strip()
    return float(age) if age.isascii() and age.isdigit() and len(age) < 10 else 0.0
