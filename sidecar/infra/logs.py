"""Logging set-up: one line per event, the request id in each."""

import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="-")

COLOURS = {"green": "92", "yellow": "93", "red": "91", "new": "96"}
_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
_LIGHT = re.compile(r"\blight=(green|yellow|red|new)\b")
_INDENT = "    "


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class _Formatter(logging.Formatter):
    """
    A record as one line, its traceback indented.

    Names, paths and errors hold what strangers sent: it begins no line of its own and
    drives no terminal.
    """

    def __init__(self, *, colour: bool) -> None:
        super().__init__(_FORMAT, "%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Escape what cannot be printed."""
        head, separator, rest = self._parts(record)
        line = printable(head)
        if self._colour:
            line = _LIGHT.sub(_lamp, line, count=1)
        indented = [_INDENT + printable(each) for each in rest.splitlines()]
        return "\n".join([line, *indented]) if separator else line

    def _parts(self, record: logging.LogRecord) -> tuple[str, bool, str]:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        rest = self.formatException(record.exc_info) if record.exc_info else ""
        return self.formatMessage(record), bool(rest), rest


def printable(text: str) -> str:
    """A text with what begins a line or drives a terminal escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _lamp(found: re.Match[str]) -> str:
    return f"\x1b[{COLOURS[found[1]]}m●\x1b[0m {found[1]}"


def wants_colour(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """
    Whether the lines are for a person's terminal.

    FORCE_COLOR says so where it is at the other end of a pipe: the launcher sets it.
    """
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return is_terminal or environ.get("FORCE_COLOR", "0") not in ("", "0")


def make_handler(stream: TextIO, *, colour: bool) -> logging.Handler:
    """A handler that writes one line a record."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(colour=colour))
    handler.addFilter(_RequestIdFilter())
    return handler


def setup_logging(level: str, environ: Mapping[str, str]) -> None:
    """Send the `sidecar` loggers to stderr at `level` (DEBUG, INFO, WARNING, ERROR)."""
    colour = wants_colour(sys.stderr.isatty(), environ)
    logger = logging.getLogger("sidecar")
    logger.handlers[:] = [make_handler(sys.stderr, colour=colour)]
    logger.setLevel(level)
    logger.propagate = False
