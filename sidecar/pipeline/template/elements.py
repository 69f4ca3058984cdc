"""
The elements of a rendered prompt, and the proof that they give the template's text.

The substitution proof: each literal stands in the text as it is, and each span with its
own value. White space at an edge may be gone in the text (templates that trim): a
span's value is then what the text really holds. Which of the two it is, only what
follows can tell: so the run is matched with a step back where a choice turns out wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sidecar.core.prompt import SeenImage
from sidecar.memory.known_turns import Healed
from sidecar.volatile.marked_message import WHITE_SPACE, Span


@dataclass(frozen=True, slots=True)
class Splice:
    """A past turn of the model's own: its ids stand in for what the template prints."""

    message: int
    healed: Healed


@dataclass(frozen=True, slots=True)
class ImageSlot:
    """The place of an image: its ids stand in for its mark."""

    image: SeenImage


Rendered = str | Span | Splice
Element = Rendered | ImageSlot


_MAX_STEPS_BACK = 1000
_MAX_STEPS = 64  # for each element
Run = Sequence[str | Span]


def match_run(run: Run, text: str) -> list[str | Span] | None:
    """The run with the values that `text` holds; None if it does not give the text."""
    options = [_options(element) for element in run]
    chosen = [0] * len(run)
    places = [0] * (len(run) + 1)
    at, steps, steps_back = 0, 0, 0
    while at < len(run) or places[at] != len(text):
        steps += 1
        found = -1
        if at < len(run):
            found = _first_fit(options[at], chosen[at], text, places[at])
        if found >= 0:
            chosen[at] = found
            places[at + 1] = places[at] + len(options[at][found][1])
            at += 1
            continue
        at = _last_choice(options, chosen, at)
        steps_back += 1
        is_too_long = steps > _MAX_STEPS * len(run) + _MAX_STEPS_BACK
        if at < 0 or steps_back > _MAX_STEPS_BACK or is_too_long:
            return None
        chosen[at] += 1
    return [
        replace(element, value=options[i][chosen[i]][0])
        if isinstance(element, Span)
        else element
        for i, element in enumerate(run)
    ]


_Option = tuple[str, str]  # value, as it is printed


def _options(element: str | Span) -> list[_Option]:
    if isinstance(element, str):
        return [(element, element)]
    own = (element.value, element.printed(element.value))
    may_be_gone = element.kind in WHITE_SPACE and element.value
    return [own, ("", "")] if may_be_gone else [own]


def _first_fit(options: list[_Option], start: int, text: str, at: int) -> int:
    for number in range(start, len(options)):
        if text.startswith(options[number][1], at):
            return number
    return -1


def _last_choice(options: list[list[_Option]], chosen: list[int], at: int) -> int:
    """The last element before `at` with an option left; those behind begin anew."""
    if at < len(chosen):
        chosen[at] = 0
    at -= 1
    while at >= 0 and chosen[at] + 1 >= len(options[at]):
        chosen[at] = 0
        at -= 1
    return at
