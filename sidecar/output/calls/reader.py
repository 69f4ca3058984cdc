"""
Reads one block of tool calls that has begun, as it comes, and says if it is one.

The end of a call is parsed, never searched: what looks like it may stand in a string.
A block whose beginning is no call of any format is text.
"""

from sidecar.output.calls.call_sink import Block, CallSink, ToolSyntax
from sidecar.output.calls.offered_tools import OfferedTools
from sidecar.output.calls.scanner import (
    NotThisFormat,
    Scanner,
    Wait,
)
from sidecar.output.pieces import CallPart

# Python's own parsers and mlx-lm's raise any of these on text that is not theirs.
_NOT_THIS_FORMAT = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
_NEVER = "\0"  # no model's text has it
_MAX_STEPS = 64  # a text grows by this part of it at least


class CallReader:
    """
    Reads a text that begins with an opener. Not thread-safe.

    When it is done, `rest` stands behind the block; without any call in it, `rest` is
    what stands behind the opener, and `plain` that.
    """

    def __init__(self, syntax: ToolSyntax, opener: str, tools: OfferedTools) -> None:
        self._syntax = syntax
        self._opener = opener
        scan = Scanner(opener if syntax.is_inside else "")
        self._block = Block(scan, CallSink(tools.all), tools, syntax.closer)
        self._reading = self._read()
        self._waiting: list[str] = []
        self._num_waiting = 0
        self.is_done = False
        self.is_unfinished = False  # the text ended in the middle of a call
        self.is_closed = not syntax.closer
        self.is_read_to_end = False  # it may be one, but for its missing end
        self.plain = ""
        self.rest = ""

    @property
    def has_calls(self) -> bool:
        """Whether the block has a call, be it an unfinished one."""
        return self._block.sink.has_calls or not self.plain

    def feed(self, text: str) -> list[CallPart]:
        """Take more text; what can be said of the calls now."""
        self._waiting.append(text)
        self._num_waiting += len(text)
        scan = self._block.scan
        # A long text that may be read again grows in steps: no copy for each piece.
        if self._num_waiting * _MAX_STEPS < len(scan.text) and not scan.is_streamed:
            return []
        return self._read_on()

    def end(self, *, is_cut: bool) -> list[CallPart]:
        """
        End the text; then the reader is done.

        Args:
            is_cut: the model had not ended.
        """
        self._block.scan.end(is_cut=is_cut)
        return self._read_on()

    def _read_on(self) -> list[CallPart]:
        self._block.scan.feed("".join(self._waiting))
        self._waiting, self._num_waiting = [], 0
        try:
            next(self._reading)
        except StopIteration:
            self.is_done = True
        sink = self._block.sink
        self._block.scan.is_streamed = sink.is_shown
        return sink.parts()

    def _read(self) -> Wait[None]:
        """Try each format from the block's beginning until one finds a call."""
        block = self._block
        for read in self._syntax.formats:
            block.scan.at = 0
            try:
                yield from read(block)
            except _NOT_THIS_FORMAT:
                if block.sink.is_shown:
                    yield from self._broken()
                    return
                is_begun = block.sink.is_begun
                block.sink.abandon()
                if is_begun and block.scan.is_cut:
                    self.is_unfinished = True
                    return
                if not block.sink.has_calls:
                    continue
                self._end_behind_calls()
                return
            if block.sink.has_calls:
                yield from self._close()
                return
        self._refuse()

    def _close(self) -> Wait[None]:
        """Take the closer, if it is there."""
        block = self._block
        behind = block.scan.at
        yield from block.scan.space()
        if (yield from block.closes()):
            block.scan.at += len(block.closer)
            self.is_closed = True
        elif not block.closer:
            block.scan.at = behind
        self.rest = block.scan.rest

    def _broken(self) -> Wait[None]:
        """A call that was shown in part goes on as none, or the text ends in it."""
        block = self._block
        if block.scan.is_ended:
            self.is_unfinished = True
            block.sink.abandon()
            return
        pieces: list[str] = []
        try:
            yield from block.scan.until(block.closer or _NEVER, pieces.append)
        except NotThisFormat:  # it is not closed
            pieces.append(block.scan.rest)
        else:
            self.rest = block.scan.rest
        block.sink.break_off("".join(pieces))

    def _end_behind_calls(self) -> None:
        """What follows the last whole call is none."""
        scan = self._block.scan
        if scan.is_cut:
            self.is_unfinished = True
        else:
            self.rest = scan.behind(self._block.marked)

    def _refuse(self) -> None:
        scan = self._block.scan
        self.is_unfinished, self.is_read_to_end = scan.is_cut, scan.is_ended
        self.plain = self._opener
        begun = len(self._opener) if self._syntax.is_inside else 0
        self.rest = scan.text[begun:]
