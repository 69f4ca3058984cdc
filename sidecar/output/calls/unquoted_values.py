"""Values that stand in a call without quotes: their schema says what they are."""

import ast
import contextlib
from collections.abc import Callable, Sequence

from sidecar.output.calls.json_text import (
    Print,
    escaped,
    printed,
    read_value,
    value_of,
)
from sidecar.output.calls.scanner import NotThisFormat, Scanner, Wait, run_whole
from sidecar.output.calls.tool_schema import (
    ANY_TYPE,
    TEXT_ALONE,
    Types,
    type_of,
)

_MAX_LITERAL = 1 << 17  # characters that Python's own parser is given
_NO_LITERAL = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


def typed_text(text: str, types: Types = ANY_TYPE, *, is_python: bool = False) -> str:
    """
    The JSON of a value that stands without quotes: what parses, else a string.

    Args:
        types: that it may have: what is of none of them is a string, if it may be one.
        is_python: its format writes Python's constants and quotes as well as JSON's;
            others may, where no string can stand.
    """
    is_python = is_python or "string" not in types
    try:
        found = _json_or_python(text) if is_python else _json(text)
    except NotThisFormat:  # or nested too deep
        return printed(text)
    is_odd = type_of(value_of(found)) not in types - TEXT_ALONE
    if types != ANY_TYPE and "string" in types and is_odd:
        return printed(text)
    return found


def _json(text: str) -> str:
    """
    A whole value as JSON is printed; a number as it is written.

    Raises:
        NotThisFormat: it is none.
    """
    value = value_of(text)
    return text.strip() if isinstance(value, float) else printed(value)


def _json_or_python(text: str) -> str:
    """
    The same of a value as Python prints it, or with its constants and quotes in JSON.

    Raises:
        NotThisFormat: it is neither.
    """
    try:
        return _json(text)
    except NotThisFormat:
        with contextlib.suppress(*_NO_LITERAL):
            if text.strip()[:1] in "[{" and len(text) < _MAX_LITERAL:
                return printed(ast.literal_eval(text.strip()))
        scan, pieces = Scanner(f"{text.strip()}\n"), list[str]()
        scan.end(is_cut=False)
        run_whole(read_value(scan, pieces.append))
        if scan.rest != "\n":
            raise
        return "".join(pieces)


class RawText:
    """
    Shows a value that stands without quotes.

    Args:
        is_padded: a line break at both edges belongs to the format; else none does,
            for an edited line may well begin or end with one of its own.
    """

    def __init__(self, show: Print, *, is_padded: bool) -> None:
        self._show = show
        self._is_padded = is_padded
        self._is_first = True
        self._held = ""  # a line break that may be the last

    def take(self, piece: str) -> None:
        """Show a piece of a string."""
        if self._is_first:
            if not piece:
                return
            self._show('"')
            self._is_first = False
            piece = piece.removeprefix("\n") if self._is_padded else piece
        text = self._held + piece
        shown = text.removesuffix("\n") if self._is_padded else text
        self._held = text[len(shown) :]
        self._show(escaped(shown))

    def close(self) -> None:
        """It was all of the string."""
        self._show('""' if self._is_first else '"')


def read_raw_value(
    scan: Scanner,
    show: Print,
    end: str,
    is_end: Callable[[], Wait[bool]],
    *,
    types: Types,
    is_padded: bool,
    is_python: bool = False,
) -> Wait[None]:
    """
    Read a value without quotes up to its end.

    Args:
        is_end: whether the end that was just read is meant as one.
        types: that it may have. A string alone is shown as it comes; else it is JSON,
            if it parses and is of one of them, or could be no string.
        is_padded: see RawText.
        is_python: see typed_text.
    """
    if types == TEXT_ALONE:
        text = RawText(show, is_padded=is_padded)
        yield from scan.until(end, text.take, is_end)
        text.close()
        return
    pieces: list[str] = []
    yield from scan.until(end, pieces.append, is_end)
    value = "".join(pieces)
    value = value.removeprefix("\n").removesuffix("\n") if is_padded else value
    show(typed_text(value, types, is_python=is_python))


def read_held_value(
    scan: Scanner,
    show: Print,
    end: str,
    types: Types,
    choices: Sequence[str] | None,
    *,
    is_python: bool = False,
) -> Wait[None]:
    """
    Read a value that a grammar held, which lets in no free text with its end in it.

    Args:
        end: as the grammar has it. types: as read_raw_value's.
        choices: the texts that it may be; None: any. What is none of them is JSON,
            whose strings may hold what looks like the end.
    """
    if choices is None and types == TEXT_ALONE:
        text = RawText(show, is_padded=False)
        yield from scan.until(end, text.take, is_exact=True)
        text.close()
    elif choices is None:
        pieces: list[str] = []
        yield from scan.until(end, pieces.append, is_exact=True)
        show(typed_text("".join(pieces), types, is_python=is_python))
    elif (choice := (yield from _choice(scan, end, choices))) is not None:
        show(printed(choice))
    else:
        yield from read_value(scan, show)
        yield from scan.expect(end)


def _choice(scan: Scanner, end: str, choices: Sequence[str]) -> Wait[str | None]:
    """The text among these that stands here, its end behind it, if any does."""
    for choice in sorted(choices, key=len, reverse=True):  # one may hold the end
        if (yield from scan.take_exactly(choice + end)):
            return choice
    return None
