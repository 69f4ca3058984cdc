"""
Where a request speaks of newer values than one that it had before.

A note at the end states older values as what is so now. A text behind the value's
place that speaks of a newer one ("it is now 14:30") says otherwise.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from sidecar.pipeline.template.elements import Element, ImageSlot, Splice
from sidecar.volatile.marked_message import Span, SpanKey
from sidecar.volatile.rules import Policy

# A phrase that speaks of a value may have images in it: so much before it is looked at.
_MAX_PHRASE, _MAX_PIECES = 128, 16
_MAX_INTRODUCTION = 24  # characters before a value, such as "Current time is "


class NewerValues:
    """
    Of one request, whatever is asked; each text is searched once for a pattern.

    Args:
        elements: all of the request, in order. roles: of its messages.
    """

    def __init__(
        self,
        elements: Sequence[Element],
        roles: Sequence[str],
        policy: Callable[[str], Policy],
    ) -> None:
        self._elements = elements
        self._roles = roles
        self._policy = policy
        spans = [(i, e.key) for i, e in enumerate(elements) if isinstance(e, Span)]
        self._places = [place for place, _ in spans]
        self._keys = list(accumulate((key for _, key in spans), max))
        self._last: dict[tuple[str, str], int] = {}

    def are_spoken_of_behind(self, key: SpanKey) -> bool:
        """Whether a text behind a span speaks of a newer value of its kind."""
        policy = self._policy(key[2])
        # A client tells the clock of its leading system text anew in each request.
        is_said = any(role != "system" for role in self._roles[: key[0] + 1])
        pattern = policy.newer_than_said if is_said else policy.newer
        first = bisect_left(self._keys, key)  # the span itself, or one behind it
        if not pattern or first == len(self._keys):
            return False
        return self._last_match(key[2], pattern) > self._places[first]

    def _last_match(self, kind: str, pattern: str) -> int:
        """The index of the last element that speaks of a value; -1: there is none."""
        if (kind, pattern) not in self._last:
            search = re.compile(pattern).search
            indexes = reversed(range(len(self._elements)))
            found = (i for i in indexes if search(self._text(i, kind)))
            self._last[kind, pattern] = next(found, -1)
        return self._last[kind, pattern]

    def _text(self, index: int, kind: str) -> str:
        """What an element says, but for values of a kind and what introduces them."""
        element = self._elements[index]
        if isinstance(element, Span):
            return element.value if element.kind != kind else ""
        if isinstance(element, Splice):
            return element.healed.raw_text
        if not isinstance(element, str):
            return ""
        element = self._before_images(index) + element
        following = self._elements[index + 1 : index + 2]
        introduces = any(isinstance(e, Span) and e.kind == kind for e in following)
        return element[:-_MAX_INTRODUCTION] if introduces else element

    def _before_images(self, index: int) -> str:
        """The end of what is said before the images that an element stands behind."""
        said = ""
        first = max(-1, index - 1 - _MAX_PIECES)
        for before in range(index - 1, first, -1):
            piece = self._elements[before]
            if isinstance(piece, str):
                said = piece[-_MAX_PHRASE:] + said
            elif not isinstance(piece, ImageSlot):
                break
            if len(said) >= _MAX_PHRASE:
                break
        return said
