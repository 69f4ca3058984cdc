"""
Cuts a stream of generated text into reasoning, content and calls.

States and what leaves them:

    UNDECIDED --first non-blank text is the open tag--> REASONING
    UNDECIDED --any other non-blank text-------------> CONTENT
    REASONING --close tag--> CONTENT (white space after it dropped)
    REASONING --tool opener--> HOLD
    HOLD      --close tag--> CONTENT (the held text was reasoning: a quoted call)
    HOLD      --end--> complete calls: calls; anything else, or a cut: reasoning
    CONTENT   --open tag, not quoted and in no code--> REASONING
    CONTENT   --tool opener--> CALLING
    CALLING   --end of the block--> CONTENT (a block without a call is content)

The result does not depend on how the text was cut into pieces: text is held back
only while it could be the beginning of a tag that is active in the present state,
and trailing white space of the content only until more content comes.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import ToolSyntax, find_syntax
from sidecar.output.calls.offered_tools import OfferedTools
from sidecar.output.calls.reader import CallReader
from sidecar.output.channel_splitter import ChannelSplitter
from sidecar.output.output_syntax import Markers, OutputSyntax, StartMode
from sidecar.output.pieces import (
    CallEnded,
    CallPart,
    Kind,
    Piece,
    Splitter,
    could_begin,
    held_suffix,
    joined,
)

_FENCES = ("```", "~~~")
_HEAD_CHARS = 24  # of a line: enough to tell a fence
_QUOTED_LINE = re.compile(r"[\s>]*(?:(?:[-*+]|\d+[.)])\s+)?[\s>]*")
_MAX_LEADING = 2  # line breaks, as answer_grammar lets them in
_MAX_REFUSED = 64  # blocks that are no calls, behind which none is looked for
_QUOTES = "\"'`\u201c\u2018\u00ab\u201e\u201a\u00bb"


class _EndOfContent:
    """Where in a Markdown text its end is, as far as a tag there may be quoted."""

    def __init__(self) -> None:
        self._head = ""  # how the last line begins
        self._last = ""  # the last character
        self._fence = ""  # what the open fence is made of
        self._is_inline_code = False

    @property
    def is_line_start(self) -> bool:
        """Whether a line begins here."""
        return self._last in ("", "\n")

    @property
    def is_inline(self) -> bool:
        """Whether what stands here is within inline code, or behind a quote."""
        return self._is_inline_code or (self._last != "" and self._last in _QUOTES)

    @property
    def is_quoted(self) -> bool:
        """Whether a tag that stands here is spoken of."""
        return bool(self._fence) or self.is_inline

    def move(self, text: str) -> None:
        """Go to the end of more text."""
        first, *others = text.split("\n")
        self._go_on(first)
        for line in others:
            self._end_line()
            self._go_on(line)
        self._last = text[-1:] or self._last

    def _end_line(self) -> None:
        """A fence is closed by one of its own kind; it may stand in a quotation."""
        begun = _QUOTED_LINE.sub("", self._head, count=1)
        kind = next((fence for fence in _FENCES if begun.startswith(fence)), "")
        if kind and self._fence in ("", kind):
            self._fence = "" if self._fence else kind
        self._head, self._is_inline_code = "", False

    def _go_on(self, line: str) -> None:
        self._head = (self._head + line)[:_HEAD_CHARS]
        is_odd = line.count("`") % 2 == 1
        self._is_inline_code ^= is_odd


class StreamSplitter:
    """
    Splits one generation. Not thread-safe.

    Args:
        markers: the model's tags.
        start: "on" if the prompt ends in an open think block (or the family always
            begins so), "off" if thinking is off, else "undecided".
        syntaxes: how the model writes calls; none if no tool was offered.
        tools: those that were offered.
        begun: the text of an answer that the prompt ends in.
        is_held: its content is held to a form, which may have a tag as a text, and
            behind whose beginning all is text. are_calls_held: calls are.
    """

    def __init__(
        self,
        markers: Markers,
        start: StartMode,
        syntaxes: Sequence[ToolSyntax] = (),
        tools: Sequence[Tool] = (),
        begun: str = "",
        *,
        is_held: bool = False,
        are_calls_held: bool = False,
    ) -> None:
        self._markers, self._is_held = markers, is_held
        self._known: dict[bool, OfferedTools] = {}  # by whether a grammar holds them
        self._are_calls_held = are_calls_held
        self._syntaxes, self._tools = tuple(syntaxes), tools
        openers = tuple(each.opener for each in syntaxes)
        marked = tuple(each.opener for each in syntaxes if not each.at_line_start)
        self._open = _compile(markers.think_open)
        self._close = _compile(markers.think_close)
        self._reasoning_tags = (markers.think_close, *marked)
        self._in_reasoning = _compile(*self._reasoning_tags)
        tags = () if is_held else (markers.think_open,)
        self._content_tags = (*tags, *openers)
        self._in_content = _compile(*self._content_tags)
        self._step: Callable[[], Iterator[Piece] | None] = {
            "on": self._reasoning_start,
            "off": self._content,
            "undecided": self._undecided,
        }[start]
        self._buffer = ""
        self._held: list[str] = []  # HOLD: what is known to hold no close tag
        self._held_space = ""  # white space that ends the content so far
        self._reader: CallReader | None = None
        self._is_unfinished = False  # the text ended in the middle of a call
        self._has_content = False
        self._has_calls = False
        self._num_refused = 0
        self._num_leading = _MAX_LEADING  # line breaks that may stand before a form
        self._are_closed = True  # all blocks so far
        self._end = _EndOfContent()
        self._end.move(begun)

    @property
    def is_reasoning(self) -> bool:
        """Whether text fed now would, as far as is known, be reasoning."""
        return self._step in (self._reasoning, self._reasoning_start, self._hold)

    def feed(self, text: str) -> list[Piece]:
        """Take a piece of generated text; return what can be shown now."""
        self._buffer += text
        return self._run()

    def flush(self, *, is_cut: bool) -> tuple[list[Piece], bool]:
        """
        End the stream.

        Args:
            is_cut: the model had not ended.
        Returns:
            The last pieces, and whether the text was cut in the middle of a call.
        """
        pieces: list[Piece] = []
        while self._reader is not None:
            pieces += self._take_block(self._reader.end(is_cut=is_cut))
            pieces += self._run()
        rest, self._buffer = self._buffer, ""
        if self._step == self._hold:
            rest = "".join([*self._held, rest])
            calls = [] if is_cut else self._calls_in(rest)
            pieces += calls or [("reasoning", rest)]
        elif self._step in (self._reasoning, self._reasoning_start):
            pieces.append(("reasoning", rest))
        else:
            pieces += self._emit_content(rest)
        return joined(pieces), self._is_unfinished

    def _calls_in(self, text: str) -> list[Piece]:
        """The calls of a text that is nothing but complete calls; else nothing."""
        inner = StreamSplitter(self._markers, "off", self._syntaxes, self._tools)
        pieces = inner.feed(text) + inner.flush(is_cut=True)[0]
        is_whole = inner._are_closed and not inner._is_unfinished
        return pieces if is_whole and not any(map(_is_no_call, pieces)) else []

    def _run(self) -> list[Piece]:
        pieces: list[Piece] = []
        while (produced := self._step()) is not None:
            pieces.extend(produced)
        return joined(pieces)

    # One method a state: None means "needs more text", an iterable means "go on".

    def _undecided(self) -> Iterator[Piece] | None:
        text = self._buffer.lstrip()
        if not text:
            return None
        match = self._open.match(text)
        if match:
            self._buffer = text[match.end() :]
            self._step = self._reasoning
        elif could_begin(text, self._markers.think_open):
            return None
        elif self._is_held:  # white space may stand before any answer
            self._step = self._form_start
        else:
            self._step = self._content
        return iter(())

    def _reasoning_start(self) -> Iterator[Piece] | None:
        text = self._buffer.lstrip()
        if not text or could_begin(text, self._markers.think_open):
            return None
        match = self._open.match(text)
        if match:
            self._buffer = text[match.end() :]
        self._step = self._reasoning
        return iter(())

    def _reasoning(self) -> Iterator[Piece] | None:
        match = self._in_reasoning.search(self._buffer)
        if match is None:
            return self._release("reasoning", self._reasoning_tags)
        before = self._buffer[: match.start()]
        if self._close.fullmatch(match.group()):
            self._end_reasoning(match.end())
        else:
            self._buffer = self._buffer[match.start() :]
            self._held = []
            self._step = self._hold
        return _one("reasoning", before)

    def _hold(self) -> Iterator[Piece] | None:
        match = self._close.search(self._buffer)
        if match is None:
            free = max(0, len(self._buffer) - len(self._markers.think_close))
            self._held.append(self._buffer[:free])
            self._buffer = self._buffer[free:]
            return None
        held = "".join([*self._held, self._buffer[: match.start()]])
        self._end_reasoning(match.end())
        return _one("reasoning", held)

    def _end_reasoning(self, end: int) -> None:
        self._buffer = self._buffer[end:]
        self._step = self._form_start if self._is_held else self._content_start

    def _content_start(self) -> Iterator[Piece] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        self._step = self._content
        return iter(())

    def _form_start(self) -> Iterator[Piece] | None:
        """The beginning of what is held to a form, which may begin with a space."""
        while self._num_leading and self._buffer.startswith("\n"):
            self._buffer, self._num_leading = self._buffer[1:], self._num_leading - 1
        if not self._buffer:
            return None
        self._step = self._content
        return iter(())

    @property
    def _is_of_form(self) -> bool:
        """Whether all that follows is text: a form has begun, and no call was first."""
        return self._is_held and self._has_content and not self._has_calls

    def _content(self) -> Iterator[Piece] | None:
        tags = () if self._is_of_form else self._content_tags
        match = self._in_content.search(self._buffer) if tags else None
        if match is None:
            return self._release("content", tags)
        before, rest = self._buffer[: match.start()], self._buffer[match.start() :]
        spans = self._emit_content(before)
        tag = match.group()
        if self._is_of_form:
            self._buffer = rest
        elif self._open.fullmatch(tag) and not self._end.is_quoted:
            self._buffer = rest[len(tag) :]
            self._step = self._reasoning
        elif self._open.fullmatch(tag) or not self._may_call(tag):
            spans += self._emit_content(tag[:1])  # the answer speaks of the tag
            self._buffer = rest[1:]
        else:
            syntax = find_syntax(tag, self._syntaxes)
            self._reader = CallReader(syntax, tag, self._offered(syntax))
            self._buffer = rest[len(tag) :]
            self._step = self._calling
        return iter(spans)

    def _offered(self, syntax: ToolSyntax) -> OfferedTools:
        """The tools, for a block's reader: none but the model's own way is held."""
        are_held = self._are_calls_held and syntax == self._syntaxes[0]
        if are_held not in self._known:
            self._known[are_held] = OfferedTools(self._tools, are_held=are_held)
        return self._known[are_held]

    def _may_call(self, opener: str) -> bool:
        """
        Whether a block may begin at the content's end.

        Not where the answer speaks of one: in inline code or quotes, and, for an opener
        that is text and no mark of its own, in a fence.
        """
        syntax = find_syntax(opener, self._syntaxes)
        if self._num_refused > _MAX_REFUSED:
            return False
        if syntax.at_line_start and not self._end.is_line_start:
            return False
        return not (self._end.is_quoted if syntax.is_inside else self._end.is_inline)

    def _calling(self) -> Iterator[Piece] | None:
        if self._reader is None or not self._buffer:
            return None
        text, self._buffer = self._buffer, ""
        return iter(self._take_block(self._reader.feed(text)))

    def _take_block(self, parts: Sequence[CallPart]) -> list[Piece]:
        """Pieces of a block of calls; behind its end there is content again."""
        pieces: list[Piece] = [*parts]
        reader = self._reader
        if reader is None or not reader.is_done:
            return pieces
        self._reader, self._buffer = None, reader.rest
        self._step = self._content
        self._is_unfinished = reader.is_unfinished
        self._are_closed &= reader.is_closed
        if reader.has_calls:
            self._has_calls = True
            self._held_space = "\n" if self._has_content else ""
            self._step = self._content_start
        elif self._has_calls and reader.is_unfinished:
            self._buffer = ""  # the beginning of a further call
        elif reader.is_read_to_end:  # openers within it were read to the end as well
            pieces += self._emit_content(reader.plain + reader.rest)
            self._buffer = ""
        else:
            pieces += self._emit_content(reader.plain)
            self._num_refused += 1
        return pieces

    def _release(self, kind: Kind, tags: tuple[str, ...]) -> Iterator[Piece] | None:
        keep = held_suffix(self._buffer, tags)
        free = self._buffer[: len(self._buffer) - keep]
        if not free:
            return None
        self._buffer = self._buffer[len(free) :]
        if kind == "reasoning":
            return _one(kind, free)
        return iter(self._emit_content(free))

    def _emit_content(self, text: str) -> list[Piece]:
        self._end.move(text)
        text = self._held_space + text
        shown = text.rstrip()
        self._held_space = text[len(shown) :]
        self._has_content |= bool(shown)
        return [("content", shown)] if shown else []


def new_splitter(
    syntax: OutputSyntax,
    start: StartMode,
    tools: Sequence[Tool],
    *,
    is_held: bool = False,
    are_calls_held: bool = False,
    begun: str = "",
) -> Splitter:
    """
    A splitter of one generation.

    Args:
        tools: those that were offered; without any there are no calls.
        is_held: its content is held to a form, and may hold a tag as a text. A call of
            the model's own way may stand in its place, and nowhere within it.
        are_calls_held: its calls are held to the schemas of their tools.
        begun: the text of an answer that the prompt ends in.
    """
    if syntax.has_channels:
        calls = syntax.calls[0] if tools else None
        return ChannelSplitter(calls, tools, begun, is_held=is_held)
    syntaxes = syntax.calls[: 1 if is_held else None] if tools else ()
    return StreamSplitter(
        syntax.markers,
        start,
        syntaxes,
        tools,
        begun,
        is_held=is_held,
        are_calls_held=are_calls_held,
    )


def _one(kind: Kind, text: str) -> Iterator[Piece]:
    return iter([(kind, text)])


@functools.lru_cache(maxsize=256)
def _compile(*tags: str) -> re.Pattern[str]:
    # ASCII: otherwise IGNORECASE lets the Kelvin sign stand for a k.
    return re.compile("|".join(map(re.escape, tags)), re.IGNORECASE | re.ASCII)


def _is_no_call(piece: Piece) -> bool:
    if isinstance(piece, CallEnded):
        return piece.is_broken
    return isinstance(piece, tuple)
