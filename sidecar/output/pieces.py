"""What a splitter cuts a generation into."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The arguments of a call begin."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON of a call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """
    A call is complete.

    Args:
        is_broken: its arguments are no JSON: the model went on in another way after
            some of them had been shown.
    """

    is_broken: bool = False


Kind = Literal["reasoning", "content"]
CallPart = CallStarted | CallArguments | CallEnded
Piece = tuple[Kind, str] | CallPart


class Splitter(Protocol):
    """Cuts one generation into reasoning, content and calls."""

    @property
    def is_reasoning(self) -> bool:
        """Whether text fed now would, as far as is known, be reasoning."""

    def feed(self, text: str) -> list[Piece]:
        """Take a piece of generated text; return what can be shown now."""

    def flush(self, *, is_cut: bool) -> tuple[list[Piece], bool]:
        """The last pieces, and whether the text was cut in the middle of a call."""


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces without empty ones, those of one kind in a row as one."""
    whole: list[Piece] = []
    shown = (p for p in pieces if not isinstance(p, tuple) or p[1])
    for kind, group in groupby(shown, _kind_of):
        run = list(group)
        if kind == "reasoning" or kind == "content":
            whole.append((kind, "".join(p[1] for p in run if isinstance(p, tuple))))
        elif kind is CallArguments:
            texts = (p.text for p in run if isinstance(p, CallArguments))
            whole.append(CallArguments("".join(texts)))
        else:
            whole += run
    return whole


def _kind_of(piece: Piece) -> Kind | type[CallPart]:
    return piece[0] if isinstance(piece, tuple) else type(piece)


def ascii_lower(text: str) -> str:
    """Small letters; str.lower() may change the length of a text."""
    return text.translate(_LOWER)


_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


@functools.lru_cache(maxsize=256)  # each piece of an answer is held against a few tags
def _lowered(tag: str) -> str:
    return ascii_lower(tag)


def could_begin(text: str, tag: str) -> bool:
    """Whether `text` is a proper beginning of `tag`."""
    return len(text) < len(tag) and _lowered(tag).startswith(ascii_lower(text))


def held_suffix(text: str, tags: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper beginning of a tag."""
    longest = min(len(text), max(map(len, tags), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(could_begin(text[-size:], tag) for tag in tags):
            return size
    return 0
