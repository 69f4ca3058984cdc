"""What a format's reader says of the calls in a block, in order."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sidecar.core.requests import Tool
from sidecar.output.calls.offered_tools import OfferedTools
from sidecar.output.calls.scanner import NotThisFormat, Scanner, Wait
from sidecar.output.pieces import (
    CallArguments,
    CallEnded,
    CallPart,
    CallStarted,
    ascii_lower,
)

_MAX_NAME_CHARS = 256
_MAX_COMPARED = 16  # calls of one name in one block; more are sent whole


class CallSink:
    """
    Takes the calls of one block as they are read, and says what may be shown by now.

    A call is held until it is complete where its tool is not offered or asks for it
    (what comes may be no call at all), and while it says what an earlier one of its
    block has said: then it is that one.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._parts: list[CallPart] = []
        self._said: set[tuple[str, str]] = set()  # names, arguments with sorted keys
        self._texts: dict[str, list[str]] = {}  # arguments by name
        self._name: str | None = None  # of the call that is read now
        self._pieces: list[str] = []  # of its arguments
        self._begun = ""  # the same, while it is held
        self._is_held = False

    @property
    def is_shown(self) -> bool:
        """Whether the call that is read now has been shown in part."""
        return self._name is not None and not self._is_held

    @property
    def is_begun(self) -> bool:
        """Whether a call of an offered tool has arguments that are not shown yet."""
        return self._is_held and self.is_offered(self._name) and bool(self._begun)

    def is_offered(self, name: str | None) -> bool:
        """Whether there is a tool of that name."""
        return name in self._tools

    @property
    def has_calls(self) -> bool:
        """Whether a call is complete."""
        return bool(self._said)

    def parts(self) -> list[CallPart]:
        """What has come since this was asked last."""
        parts, self._parts = self._parts, []
        return parts

    def start(self, name: str) -> None:
        """
        The arguments of a call begin.

        Raises:
            NotThisFormat: it has no name.
        """
        if not 0 < len(name) <= _MAX_NAME_CHARS or not name.isprintable():
            raise NotThisFormat("a call needs a name")
        # Shown with the first piece of its arguments: without any it could be run as it
        # is, if it broke there or was cut.
        self._name, self._is_held = name, True
        self._pieces, self._begun = [], ""

    def hold(self, name: str) -> None:
        """Arguments of a call have begun that are read when it is whole."""
        self.start(name)
        self._begun = "{"

    def arguments(self, text: str) -> None:
        """A piece of their JSON."""
        if not text:
            return
        self._pieces.append(text)
        if not self._is_held:
            self._parts.append(CallArguments(text))
            return
        self._begun += text
        self._show_if_free()

    def end(self) -> None:
        """The call is complete."""
        name, arguments = self._name or "", "".join(self._pieces)
        said = (name, json.dumps(json.loads(arguments), sort_keys=True))
        if self._is_held and said not in self._said:
            self._show()
        if not self._is_held:
            self._parts.append(CallEnded())
        self._said.add(said)
        self._texts.setdefault(name, []).append(arguments)
        self.abandon()

    def call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self.start(name)
        self.arguments(arguments)
        self.end()

    def abandon(self) -> None:
        """What was begun is no call."""
        self._name, self._is_held = None, False

    def break_off(self, rest: str) -> None:
        """
        What was begun and shown goes on with what is no JSON.

        Nobody may run it: what a lenient parser would take has one quote more.
        """
        if _is_lenient_json("".join([*self._pieces, rest])):
            rest += '"'
        if rest:
            self._parts.append(CallArguments(rest))
        self._parts.append(CallEnded(is_broken=True))
        self.abandon()

    def _show_if_free(self) -> None:
        """Show what is held, unless it may be no call, or one that was said before."""
        tool = self._tools.get(self._name or "")
        said = self._texts.get(self._name or "", ())
        if tool is None or tool.is_sent_whole or len(said) > _MAX_COMPARED:
            return
        if not any(text.startswith(self._begun) for text in said):
            self._show()

    def _show(self) -> None:
        self._is_held = False
        self._parts.append(CallStarted(self._name or ""))
        if self._begun:
            self._parts.append(CallArguments(self._begun))


@dataclass(slots=True)
class Block:
    """
    One block of calls while it is read.

    Args:
        closer: what ends it; "" if nothing does.
        marked: what was read when the last call was complete, as Scanner.num_read.
    """

    scan: Scanner
    sink: CallSink
    tools: OfferedTools
    closer: str = ""
    marked: int = 0

    def mark(self) -> None:
        """All that was read so far is calls; what follows may be something else."""
        self.marked = self.scan.num_read

    def end_call(self) -> None:
        """The call that is read now is complete: what was read is not read again."""
        self.sink.end()
        self.scan.is_streamed = False  # the next one may be none
        self.mark()

    def take_call(self, name: str, arguments: str) -> None:
        """Take a whole call."""
        self.sink.call(name, arguments)
        self.mark()

    def closes(self) -> Wait[bool]:
        """Whether the block's closer stands here."""
        return bool(self.closer) and (yield from self.scan.stands(self.closer))

    def goes_on(self, is_followed: Wait[bool]) -> Wait[bool]:
        """
        Whether what follows an argument's end is more of the call, or its end.

        Args:
            is_followed: reads it; what it raises says no, if the text was not cut.
        """
        scan = self.scan
        is_over = not (yield from scan.space()) and not scan.is_cut
        if is_over or (yield from self.closes()):
            return True
        try:
            return (yield from is_followed)
        except NotThisFormat:
            if scan.is_cut:
                raise
            return False


# Reads the inside of a block. Where that is not of the format it finds no call, or
# raises what Python's own parsers raise on such a text.
Format = Callable[[Block], Wait[None]]


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """
    One way in which a model writes calls.

    Args:
        opener, closer: what stands around a block; closer "" if nothing ends it.
        formats: readers of a block's inside, tried in order.
        is_inside: whether the opener is the beginning of the first call.
        at_line_start: whether a block begins at the start of a line only.
        call_end: what stands behind each call, if that is not the closer.
    """

    opener: str
    closer: str
    formats: tuple[Format, ...]
    is_inside: bool = False
    at_line_start: bool = False
    call_end: str = ""


def _is_lenient_json(text: str) -> bool:
    """Whether Python's parser takes it, which knows NaN and raw line breaks."""
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def find_syntax(opener: str, syntaxes: Sequence[ToolSyntax]) -> ToolSyntax:
    """The syntax that an opener is of, whatever the case of its letters."""
    lower = ascii_lower(opener)
    return next(each for each in syntaxes if ascii_lower(each.opener) == lower)
