"""Elements of a call's markup, found by reading the text once."""

import re
from collections.abc import Callable, Iterator, Sequence

_MOST_UNCLOSED = 64
Closer = Callable[[re.Match[str]], re.Pattern[str]]
Element = tuple[re.Match[str], str]  # the opener, what stands inside


def cut_elements(
    text: str, opener: re.Pattern[str], closer: re.Pattern[str] | Closer
) -> tuple[list[Element], str]:
    """
    What `opener(.*?)closer` finds in a text, and all text that it does not.

    As one pattern that would be searched for to the end behind each opener that
    nothing closes.

    Args:
        closer: or what gives the closer of an opener; then text with many openers
            that nothing closes is no such markup.
    Raises:
        ValueError: it is none.
    """
    elements: list[Element] = []
    rest: list[str] = []
    at = 0
    for begun, ended in _pairs(text, opener, closer):
        elements.append((begun, text[begun.end() : ended.start()]))
        rest.append(text[at : begun.start()])
        at = ended.end()
    return elements, "".join([*rest, text[at:]])


def _pairs(
    text: str, opener: re.Pattern[str], closer: re.Pattern[str] | Closer
) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    at, num_unclosed = 0, 0
    while begun := opener.search(text, at):
        closes = closer if isinstance(closer, re.Pattern) else closer(begun)
        ended = closes.search(text, begun.end())
        if ended is not None:
            yield begun, ended
            at = ended.end()
        elif isinstance(closer, re.Pattern):
            return  # nor are those behind it
        else:
            at = begun.start() + 1
            num_unclosed += 1
            if num_unclosed > _MOST_UNCLOSED:
                raise ValueError("elements that nothing closes")


def texts(elements: Sequence[Element]) -> list[tuple[str, str]]:
    """(first group of the opener, inside) of each element."""
    return [(begun.group(1), inside) for begun, inside in elements]
