"""Puts spans that a request no longer has back into their canonical places."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.pipeline.template.elements import Element, ImageSlot, Splice
from sidecar.volatile.marked_message import Span, SpanKey


def put_back(elements: Sequence[Element], gone: Sequence[SpanKey]) -> list[Element]:
    """
    Insert empty spans at the canonical places of `gone`, which ascend.

    A place that cannot be found again is left out: then M differs from what is
    stored, and reuse ends there.
    """
    result = list(elements)
    places = _places(elements)
    for key in reversed(gone):  # each goes before what stands at its place
        message, place, kind, nth = key
        found = places[message].find(place) if message in places else None
        if found is None:
            continue
        index, offset = found
        is_quoted = places[message].is_quoted
        span = Span(kind, message, place, "", nth=nth, is_quoted=is_quoted)
        literal = result[index]
        if isinstance(literal, str) and 0 < offset < len(literal):
            result[index : index + 1] = [literal[:offset], span, literal[offset:]]
        else:
            result.insert(index + (1 if offset else 0), span)
    return result


@dataclass(slots=True)
class _ElementStarts:
    """
    Where the elements of a message begin, from its first span to the next message's.

    What is put in behind a place moves nothing before it: so this stays true while
    spans are put back from the last to the first.
    """

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # a span's end is its start
    indexes: list[int] = field(default_factory=list)
    at: int = 0
    is_quoted: bool = False

    def add(self, index: int, element: str | Span | ImageSlot) -> None:
        """The next element."""
        is_text = not isinstance(element, Span)
        text = _canonical(element)
        if text or not is_text:
            self.starts.append(self.at)
            self.ends.append(self.at + len(text) if is_text else self.at)
            self.indexes.append(index)
        self.at += len(text)

    def find(self, place: int) -> tuple[int, int] | None:
        """Element index and offset in it where a canonical place lies."""
        number = bisect.bisect_left(self.starts, place)
        if number < len(self.starts) and self.starts[number] == place:
            return self.indexes[number], 0
        if number and place < self.ends[number - 1]:
            return self.indexes[number - 1], place - self.starts[number - 1]
        return None


def _places(elements: Sequence[Element]) -> dict[int, _ElementStarts]:
    found: dict[int, _ElementStarts] = {}
    current: _ElementStarts | None = None
    for index, element in enumerate(elements):
        if isinstance(element, Span):
            if element.message not in found:
                current = found[element.message] = _ElementStarts()
                current.at = len(element.sentinel)  # nothing goes before the first
            elif current is not None:
                current.add(index, element)
            found[element.message].is_quoted |= element.is_quoted
        elif isinstance(element, Splice):
            current = None
        elif current is not None:
            current.add(index, element)
    return found


def _canonical(element: str | Span | ImageSlot) -> str:
    """What a place is counted in: the message's text with sentinels and marks."""
    if isinstance(element, ImageSlot):
        return element.image.mark
    return element if isinstance(element, str) else element.sentinel
