"""A message as literal text and volatile spans."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.core.requests import Message

SpanKey = tuple[int, int, str, int]  # message, place in it, kind, which there
WHITE_SPACE = ("edge_ws", "tail_ws")  # kinds of spans that rules.toml does not name


@dataclass(frozen=True, slots=True)
class Span:
    """
    A declared-volatile stretch.

    Args:
        message: index of its message.
        place: offset in the message's canonical text; equal places pair.
        nth: which of several of its kind at that place.
        is_quoted: the template prints its message as a JSON string.
    """

    kind: str
    message: int
    place: int
    value: str
    sentinel: str = ""
    nth: int = 0
    is_quoted: bool = False

    def printed(self, value: str) -> str:
        """What stands in the prompt where this span has that value."""
        return json.dumps(value, ensure_ascii=False)[1:-1] if self.is_quoted else value

    @property
    def key(self) -> SpanKey:
        """What pairs with the same span of another request."""
        return (self.message, self.place, self.kind, self.nth)


@dataclass(frozen=True, slots=True)
class MarkedMessage:
    """A message as literal texts and spans, in order."""

    message: Message
    pieces: tuple[str | Span, ...]


def canonical_text(pieces: Sequence[str | Span]) -> str:
    """The message's text with sentinels for spans."""
    return "".join(p if isinstance(p, str) else p.sentinel for p in pieces)
