"""
Prompts far too long for the model are refused before they are tokenised whole.

Ten megabytes take a tokenizer many seconds, and the first tenth tells as much.
"""

from collections.abc import Sequence

from sidecar.core.errors import ContextLengthExceeded
from sidecar.pipeline.template.elements import Element, Splice
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.volatile.spans import Span

_CHARS_A_TOKEN = 8  # a text below this is tokenised whole: it may well fit
_MOST_CUT = 16  # ids that a cut inside a word may add: its halves' own


def check_length(
    elements: Sequence[Element], encoder: PromptEncoder, most_tokens: int
) -> None:
    """
    Refuse a prompt that certainly has more ids than allowed.

    Raises:
        ContextLengthExceeded: with the number of ids that were counted.
    """
    if sum(map(_num_chars, elements)) <= most_tokens * _CHARS_A_TOKEN:
        return
    num_ids = 0
    for element in elements:
        num_ids += _least_ids(element, encoder, most_tokens - num_ids)
        if num_ids > most_tokens:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {most_tokens + 1} tokens, "
                f"and the prompt has more than {num_ids}",
                num_tokens=num_ids,
            )


def _num_chars(element: Element) -> int:
    if isinstance(element, str):
        return len(element)
    return len(element.value if isinstance(element, Span) else element.healed.raw_text)


def _least_ids(element: Element, encoder: PromptEncoder, most: int) -> int:
    """Read a text in parts until it has more than so many ids; how many it has."""
    if isinstance(element, Splice):
        return len(element.healed.raw_ids)
    text = element.value if isinstance(element, Span) else element
    num_ids = start = 0
    while start < len(text) and num_ids <= most:
        end = start + max(most, 1024) * 2
        end = text.rfind("\n", start + 1, end) + 1 or end
        found = encoder.count(text[start:end])
        num_ids += max(0, found - _MOST_CUT)
        start = end
    return num_ids
