"""Stop strings in a stream of text: found across pieces, never shown."""

from typing import NamedTuple


class Stopped(NamedTuple):
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None


class StopStrings:
    """
    Watches one stream for any of `stops` (non-empty texts).

    The match that is complete first wins, of two that end together the longer: so
    the result does not depend on how the text was cut.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> Stopped:
        """Take a piece; text that could begin a stop string is held back."""
        if not self._stops:
            return Stopped(text, None)
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return Stopped(text[:at], stop)
        keep = self._could_begin(text)
        self._held = text[len(text) - keep :]
        return Stopped(text[: len(text) - keep], None)

    def flush(self) -> str:
        """What is held back, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
