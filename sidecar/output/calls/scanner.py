"""
Text that arrives in pieces, read by parsers that wait for more of it.

A parser is a generator: it yields nothing but the wish for more text, and goes on where
it was once there is some. So each format is written as if all of its text were there.
"""

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from sidecar.output.pieces import ascii_lower, could_begin, held_suffix

T = TypeVar("T")
Wait = Generator[None, None, T]  # a parser; T is what it returns when it is done

_SPACE = re.compile(r"\s*")
_MAX_TAG_CHARS = 512


class NotThisFormat(ValueError):
    """What was written is no call of this format, or not a whole one."""


class TextEnded(NotThisFormat):
    """The text ended in the middle of a call."""

    def __init__(self) -> None:
        super().__init__("the text ends in the middle of a call")


class Scanner:
    """
    A text and the place in it that is read next. Not thread-safe.

    Args:
        text: what is there so far.

    What a long text says is forgotten as it is read, once a call of it has been shown
    (`is_streamed`).
    """

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.at = 0
        self.is_ended = False
        self.is_cut = False
        self.is_streamed = False
        self._num_dropped = 0

    def feed(self, text: str) -> None:
        """More text is there."""
        self.text += text

    def end(self, *, is_cut: bool) -> None:
        """
        No more text will come.

        Args:
            is_cut: though the model had not ended.
        """
        self.is_ended, self.is_cut = True, is_cut

    @property
    def rest(self) -> str:
        """What is not read yet."""
        return self.text[self.at :]

    @property
    def num_read(self) -> int:
        """Characters that were read, with those that were forgotten."""
        return self._num_dropped + self.at

    def behind(self, num_read: int) -> str:
        """What stands behind so many characters."""
        return self.text[max(0, num_read - self._num_dropped) :]

    def drop(self) -> None:
        """Forget what was read, if no parser will go back to it (`is_streamed`)."""
        if self.is_streamed:
            self._num_dropped += self.at
            self.text, self.at = self.rest, 0

    @property
    def begins_line(self) -> bool:
        """Whether a line break stands in the white space before this place."""
        at = self.at
        while at and self.text[at - 1].isspace():
            at -= 1
            if self.text[at] == "\n":
                return True
        return False

    def more(self) -> Wait[None]:
        """
        Wait for more text.

        Raises:
            TextEnded: there will be none.
        """
        if self.is_ended:
            raise TextEnded
        yield

    def peek(self) -> Wait[str]:
        """The next character; "" at the end."""
        while self.at >= len(self.text) and not self.is_ended:
            yield
        return self.text[self.at : self.at + 1]

    def char(self) -> Wait[str]:
        """Take one character."""
        char = yield from self.following()
        self.at += 1
        return char

    def following(self) -> Wait[str]:
        """
        The next character.

        Raises:
            TextEnded: there is none: what was read may be a part only.
        """
        char = yield from self.peek()
        if not char:
            raise TextEnded
        return char

    def space(self) -> Wait[str]:
        """Skip white space; the character behind it, "" at the end."""
        while True:
            if match := _SPACE.match(self.text, self.at):
                self.at = match.end()
            if self.at < len(self.text) or self.is_ended:
                return self.text[self.at : self.at + 1]
            yield

    def stands(self, literal: str) -> Wait[bool]:
        """Whether a text stands here, whatever the case of its ASCII letters."""
        while not self.is_ended and could_begin(self._next(literal), literal):
            yield
        return ascii_lower(self._next(literal)) == ascii_lower(literal)

    def take_exactly(self, literal: str) -> Wait[bool]:
        """Take a text if it stands here, its letters of the same case."""
        while not self.is_ended:
            there = self._next(literal)
            if len(there) == len(literal) or not literal.startswith(there):
                break
            yield
        found = self._next(literal) == literal
        self.at += len(literal) if found else 0
        return found

    def _next(self, literal: str) -> str:
        return self.text[self.at : self.at + len(literal)]

    def take(self, literal: str) -> Wait[bool]:
        """Take a text if it stands here."""
        found = yield from self.stands(literal)
        if found:
            self.at += len(literal)
        return found

    def expect(self, literal: str) -> Wait[None]:
        """
        Take a text that must stand here.

        Raises:
            NotThisFormat: another one does. TextEnded: none does.
        """
        if (yield from self.take(literal)):
            return
        if could_begin(self._next(literal), literal):
            raise TextEnded
        raise NotThisFormat(f"{literal!r} is missing")

    def run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """
        Take all characters of a kind.

        Args:
            pattern: of any number of them.
        """
        start = self.at
        while True:
            if match := pattern.match(self.text, self.at):
                self.at = match.end()
            if self.at < len(self.text) or self.is_ended:
                return self.text[start : self.at]
            yield

    def tag(self) -> Wait[str]:
        """Take what stands between here and the next `>`, with it."""
        return (yield from self.through(">", _MAX_TAG_CHARS)) + ">"

    def through(self, end: str, max_chars: int) -> Wait[str]:
        """Take a short text and its end; the text."""
        ends = _folded(end)
        while (found := ends.search(self.text, self.at)) is None:
            if len(self.text) - self.at > max_chars:
                raise NotThisFormat(f"{end!r} is missing")
            yield from self.more()
        text = self.text[self.at : found.start()]
        self.at = found.end()
        return text

    def until(
        self,
        end: str,
        take: Callable[[str], None],
        is_end: Callable[[], Wait[bool]] | None = None,
        *,
        is_exact: bool = False,
    ) -> Wait[None]:
        """
        Take a text up to its end, in pieces as they come, and the end.

        Args:
            take: is given the pieces.
            is_end: whether the end that was just read is meant as one; it may read on,
                and what it read is read again. None: the first one is.
            is_exact: the end's letters are of the case that they have in `end`.
        """
        closes = re.compile(re.escape(end)) if is_exact else _folded(end)
        while True:
            found = closes.search(self.text, self.at)
            if found is None:
                free = len(self.text) - held_suffix(self.rest, (end,))
                take(self.text[self.at : free])
                self.at = free
                self.drop()
                yield from self.more()
                continue
            take(self.text[self.at : found.start()])
            self.at = behind = found.end()
            if is_end is None or (yield from is_end()):
                self.at = behind
                return
            take(found.group())
            self.at = behind


def run_whole(reading: Wait[None]) -> None:
    """Run a parser whose text has ended: it waits for nothing."""
    for _ in reading:
        raise AssertionError("a parser waits for a text that has ended")


@functools.lru_cache(maxsize=256)
def _folded(text: str) -> re.Pattern[str]:
    """What finds a text, whatever the case of its ASCII letters."""
    return re.compile(re.escape(text), re.IGNORECASE | re.ASCII)
