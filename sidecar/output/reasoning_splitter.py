"""
Cuts a stream of generated text into reasoning, content and a tool buffer.

States and what leaves them:

    UNDECIDED --first non-blank text is the open tag--> REASONING
    UNDECIDED --any other non-blank text-------------> CONTENT
    REASONING --close tag--> CONTENT (white space after it dropped)
    REASONING --tool opener--> HOLD
    HOLD      --close tag--> CONTENT (the held text was reasoning: a quoted call)
    HOLD      --end--> a complete call: tool buffer; anything else: reasoning
    CONTENT   --open tag, not quoted and in no code--> REASONING
    CONTENT   --tool opener--> TOOL (to the end)

The result does not depend on how the text was cut into pieces: text is held back
only while it could be the beginning of a tag that is active in the present state,
and trailing white space of the content only until more content comes.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["reasoning", "content"]
_FENCES = ("```", "~~~")
_HEAD_CHARS = 8  # of a line: enough to tell a fence
_QUOTES = "\"'`\u201c\u2018\u00ab"
StartMode = Literal["on", "off", "undecided"]
Span = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Markers:
    """
    The tags of one model.

    Args:
        think_open, think_close: compared without regard to ASCII case.
        tool_openers: texts that begin a tool call; empty if no tool was offered.
        are_in_content: whether an open tag within the content begins thinking: not in
            an answer that is held to a form, which may hold it as a text.
    """

    think_open: str = "<think>"
    think_close: str = "</think>"
    tool_openers: tuple[str, ...] = ()
    are_in_content: bool = True


class Splitter(Protocol):
    """Cuts one generation into reasoning, content and a tool buffer."""

    @property
    def is_reasoning(self) -> bool:
        """Whether text fed now would, as far as is known, be reasoning."""

    @property
    def held_space(self) -> str:
        """White space behind the content so far, not shown."""

    def feed(self, text: str) -> list[Span]:
        """Take a piece of generated text; return what can be shown now."""

    def flush(self) -> tuple[list[Span], str]:
        """The last spans, and the tool buffer ("" if no tool call began)."""


def _never_complete(_text: str) -> bool:
    return False


class _EndOfContent:
    """Where in a Markdown text its end is, as far as a tag there may be quoted."""

    def __init__(self) -> None:
        self._head = ""  # how the last line begins
        self._last = ""  # the last character
        self._is_fenced = False
        self._is_inline_code = False

    @property
    def is_quoted(self) -> bool:
        """Whether a tag that stands here is spoken of."""
        is_code = self._is_fenced or self._is_inline_code
        return is_code or (self._last != "" and self._last in _QUOTES)

    def move(self, text: str) -> None:
        """Go to the end of more text."""
        first, *others = text.split("\n")
        self._go_on(first)
        for line in others:
            self._is_fenced ^= self._head.startswith(_FENCES)
            self._head, self._is_inline_code = "", False
            self._go_on(line)
        self._last = text[-1:] or self._last

    def _go_on(self, line: str) -> None:
        self._head = (self._head + line).lstrip()[:_HEAD_CHARS]
        is_odd = line.count("`") % 2 == 1
        self._is_inline_code ^= is_odd


class StreamSplitter:
    """
    Splits one generation. Not thread-safe.

    Args:
        markers: the model's tags.
        start: "on" if the prompt ends in an open think block (or the family always
            begins so), "off" if thinking is off, else "undecided".
        is_complete_call: whether a text is whole tool calls and nothing else.
    """

    def __init__(
        self,
        markers: Markers,
        start: StartMode,
        is_complete_call: Callable[[str], bool] = _never_complete,
    ) -> None:
        self._markers = markers
        self._is_complete_call = is_complete_call
        self._open = _compile(markers.think_open)
        self._close = _compile(markers.think_close)
        self._in_reasoning = _compile(markers.think_close, *markers.tool_openers)
        tags = (markers.think_open,) if markers.are_in_content else ()
        self._content_tags = (*tags, *markers.tool_openers)
        self._in_content = _compile(*self._content_tags)
        self._step: Callable[[], Iterator[Span] | None] = {
            "on": self._reasoning_start,
            "off": self._content,
            "undecided": self._undecided,
        }[start]
        self._buffer = ""
        self._held: list[str] = []  # HOLD: what is known to hold no close tag
        self._held_space = ""  # white space that ends the content so far
        self._tool: list[str] | None = None
        self._end = _EndOfContent()

    @property
    def is_reasoning(self) -> bool:
        """Whether text fed now would, as far as is known, be reasoning."""
        return self._step in (self._reasoning, self._reasoning_start, self._hold)

    @property
    def held_space(self) -> str:
        """White space behind the content so far, not shown."""
        return self._held_space

    def feed(self, text: str) -> list[Span]:
        """Take a piece of generated text; return what can be shown now."""
        if self._tool is not None:
            self._tool.append(text)
            return []
        self._buffer += text
        return self._run()

    def flush(self) -> tuple[list[Span], str]:
        """
        End the stream.

        Returns:
            The last spans, and the tool buffer ("" if no tool call began).
        """
        spans: list[Span] = []
        rest, self._buffer = self._buffer, ""
        if self._step == self._hold:
            rest = "".join([*self._held, rest])
            if self._is_complete_call(rest):
                return spans, rest
            spans.append(("reasoning", rest))
        elif self._step in (self._reasoning, self._reasoning_start):
            spans.append(("reasoning", rest))
        elif self._tool is None:
            spans.extend(self._emit_content(rest))
        return joined(spans), "".join(self._tool or ())

    def _run(self) -> list[Span]:
        spans: list[Span] = []
        while (produced := self._step()) is not None:
            spans.extend(produced)
        return joined(spans)

    # One method a state: None means "needs more text", an iterable means "go on".

    def _undecided(self) -> Iterator[Span] | None:
        text = self._buffer.lstrip()
        if not text:
            return None
        match = self._open.match(text)
        if match:
            self._buffer = text[match.end() :]
            self._step = self._reasoning
        elif _could_begin(text, self._markers.think_open):
            return None
        else:
            self._step = self._content
        return iter(())

    def _reasoning_start(self) -> Iterator[Span] | None:
        text = self._buffer.lstrip()
        if not text or _could_begin(text, self._markers.think_open):
            return None
        match = self._open.match(text)
        if match:
            self._buffer = text[match.end() :]
        self._step = self._reasoning
        return iter(())

    def _reasoning(self) -> Iterator[Span] | None:
        match = self._in_reasoning.search(self._buffer)
        if match is None:
            return self._release(
                "reasoning", (self._markers.think_close, *self._markers.tool_openers)
            )
        before = self._buffer[: match.start()]
        if self._close.fullmatch(match.group()):
            self._end_reasoning(match.end())
        else:
            self._buffer = self._buffer[match.start() :]
            self._held = []
            self._step = self._hold
        return _one("reasoning", before)

    def _hold(self) -> Iterator[Span] | None:
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
        self._step = self._content_start

    def _content_start(self) -> Iterator[Span] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        self._step = self._content
        return iter(())

    def _content(self) -> Iterator[Span] | None:
        match = self._in_content.search(self._buffer) if self._content_tags else None
        if match is None:
            return self._release("content", self._content_tags)
        before, rest = self._buffer[: match.start()], self._buffer[match.start() :]
        spans = self._emit_content(before)
        tag = match.group()
        if self._open.fullmatch(tag) and self._end.is_quoted:
            spans += self._emit_content(tag)  # the answer speaks of the tag
            self._buffer = rest[len(tag) :]
        elif self._open.fullmatch(tag):
            self._buffer = rest[len(tag) :]
            self._step = self._reasoning
        else:
            self._buffer, self._tool = "", [rest]
            self._step = self._tool_forever
        return iter(spans)

    def _tool_forever(self) -> Iterator[Span] | None:
        return None

    def _release(self, kind: Kind, tags: tuple[str, ...]) -> Iterator[Span] | None:
        keep = held_suffix(self._buffer, tags)
        free = self._buffer[: len(self._buffer) - keep]
        if not free:
            return None
        self._buffer = self._buffer[len(free) :]
        if kind == "reasoning":
            return _one(kind, free)
        return iter(self._emit_content(free))

    def _emit_content(self, text: str) -> list[Span]:
        self._end.move(text)
        text = self._held_space + text
        shown = text.rstrip()
        self._held_space = text[len(shown) :]
        return [("content", shown)] if shown else []


def _one(kind: Kind, text: str) -> Iterator[Span]:
    return iter([(kind, text)])


def _compile(*tags: str) -> re.Pattern[str]:
    # ASCII: otherwise IGNORECASE lets the Kelvin sign stand for a k.
    return re.compile("|".join(map(re.escape, tags)), re.IGNORECASE | re.ASCII)


def _could_begin(text: str, tag: str) -> bool:
    """Whether `text` is a proper beginning of `tag`."""
    return len(text) < len(tag) and tag.lower().startswith(text.lower())


def held_suffix(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is a proper beginning of a tag."""
    longest = min(len(text), max(map(len, tags), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(_could_begin(text[-size:], tag) for tag in tags):
            return size
    return 0


def joined(spans: list[Span]) -> list[Span]:
    """Spans without empty ones, those of one kind in a row as one."""
    whole: list[Span] = []
    for kind, text in spans:
        if not text:
            continue
        if whole and whole[-1][0] == kind:
            whole[-1] = (kind, whole[-1][1] + text)
        else:
            whole.append((kind, text))
    return whole
