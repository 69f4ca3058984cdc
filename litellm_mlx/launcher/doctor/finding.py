"""What a check found, and the one line that mends it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "bad"]
_SIGNS: dict[State, str] = {"ok": "✓", "warn": "!", "bad": "✗"}


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One finding.

    Args:
        group: what it is of. found: in words. mend: one line; "": nothing need be.
        fix: does what `mend` says, where that harms nothing; None: nobody but the user.
    """

    group: str
    state: State
    found: str
    mend: str = ""
    fix: Callable[[], None] | None = None

    def __str__(self) -> str:
        """As it is printed."""
        line = f"{_SIGNS[self.state]} {self.group:9} {_printable(self.found)}"
        return f"{line}\n            {_printable(self.mend)}" if self.mend else line


def _printable(text: str) -> str:
    """Without what drives a terminal: command lines and names are strangers'."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
