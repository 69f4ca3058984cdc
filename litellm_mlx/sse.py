"""
Server-sent events, bytes to events. No I/O.

A stream is a row of lines; a blank line ends an event. A line ends with LF, CR LF
or CR. A line `field: value` adds to the event, a line `: text` is a comment. What
stands after the last blank line is no event. How the bytes were cut into pieces
does not matter. Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event; `data` lines are joined by newlines, `event` is its type if given."""

    data: str
    event: str = "message"


class EventDecoder:
    """Turns pieces of a byte stream into events. One object for one stream."""

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._skip_lf = False  # the last piece ended in CR: an LF belongs to it
        self._at_start = True
        self._data: list[str] = []
        self._event = ""

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Take the next bytes and return the events they complete, maybe none."""
        if self._skip_lf and piece:
            piece = piece.removeprefix(b"\n")
            self._skip_lf = False
        if not piece:
            return []
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        # A CR at the very end ends its line now: waiting for a possible LF would
        # hold back a finished event.
        self._skip_lf = piece.endswith(b"\r")
        found = (self._take_line(line) for line in lines)
        return [event for event in found if event is not None]

    def _take_line(self, line: bytes) -> ServerEvent | None:
        if self._at_start:
            line = line.removeprefix(_BOM)
            self._at_start = False
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", errors="replace")
        if field == b"data":
            self._data.append(text)
        elif field == b"event":
            self._event = text
        return None  # comments (empty field), id, retry and unknown fields

    def _dispatch(self) -> ServerEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return ServerEvent("\n".join(data), event or "message")
