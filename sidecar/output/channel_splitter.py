"""
Cuts a stream of messages on channels (gpt-oss) into reasoning, content and tool buffer.

    HEADER --message token--> BODY (its header tells the kind)
    BODY   --end, call, return or start token--> HEADER

A header with a recipient is a call, one of the channel `analysis` is reasoning, any
other is content. The prompt ends within a header, behind the role. As with
`StreamSplitter`, the result does not depend on how the text was cut into pieces.
"""

import re
from typing import Literal

from sidecar.output.reasoning_splitter import Kind, Span, held_suffix, joined

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_MAX_HEADER_CHARS = 4096
_RECIPIENT = re.compile(r"\bto=")


class ChannelSplitter:
    """
    Splits one generation. Not thread-safe.

    Args:
        has_tools: a call may be made; else it is content.
    """

    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._kind: Kind | Literal["tool"] | None = None  # None: in a header
        self._buffer = ""
        self._tool: list[str] = []
        self._seam: dict[str, str] = {}  # before the next text of a kind
        self._shown: set[str] = set()  # kinds of which there was some

    @property
    def is_reasoning(self) -> bool:
        """Whether text fed now would, as far as is known, be reasoning."""
        return self._kind == "reasoning"

    @property
    def held_space(self) -> str:
        """White space behind the content so far, not shown."""
        return self._seam.get("content", "")

    def feed(self, text: str) -> list[Span]:
        """Take a piece of generated text; return what can be shown now."""
        self._buffer += text
        spans: list[Span] = []
        while (found := self._step()) is not None:
            spans += found
        return joined(spans)

    def flush(self) -> tuple[list[Span], str]:
        """
        End the stream.

        Returns:
            The last spans, and the tool buffer ("" if no tool call began).
        """
        rest, self._buffer = self._buffer, ""
        spans: list[Span] = []
        if self._kind is not None:
            spans = self._emit(rest)
        return spans, "".join(self._tool)

    def _step(self) -> list[Span] | None:
        """Take one header or a part of a body; None: more text is needed."""
        return self._header() if self._kind is None else self._body()

    def _header(self) -> list[Span] | None:
        header, found, rest = self._buffer.partition(_MESSAGE)
        may_end = 0 if found else len(_MESSAGE) - 1  # what may be half of the token
        if len(header) - may_end > _MAX_HEADER_CHARS or _is_no_header(header):
            self._kind = "content"
            return []
        if not found:
            return None
        self._buffer = rest
        recipient = _RECIPIENT.search(header)
        if recipient and self._has_tools:
            self._kind = "tool"
            self._tool.append(header[recipient.start() :] + _MESSAGE)
        elif "<|channel|>analysis" in header:
            self._kind = "reasoning"
        else:
            self._kind = "content"
        return []

    def _body(self) -> list[Span] | None:
        end = _END.search(self._buffer)
        if end is None:
            keep = held_suffix(self._buffer, _ENDS)
            free = self._buffer[: len(self._buffer) - keep]
            if not free:
                return None
            self._buffer = self._buffer[len(free) :]
            return self._emit(free)
        text, self._buffer = self._buffer[: end.start()], self._buffer[end.end() :]
        spans = self._emit(text)
        if self._kind == "tool":
            self._tool.append("<|call|>")
        elif self._kind in self._shown:
            self._seam[self._kind] = "\n"
        self._kind = None
        return spans

    def _emit(self, text: str) -> list[Span]:
        kind = self._kind
        if kind is None or kind == "tool":
            self._tool.append(text)
            return []
        if kind == "content":
            # White space that may end the content waits until more of it comes.
            text = self._seam.pop("content", "") + text
            shown = text.rstrip()
            self._seam["content"] = text[len(shown) :]
            text = shown
        elif text:
            text = self._seam.pop("reasoning", "") + text
        if not text:
            return []
        self._shown.add(kind)
        return [(kind, text)]


def _is_no_header(text: str) -> bool:
    """Whether what should be a header is text of a model that writes none."""
    text = text.lstrip()
    return bool(text) and not any(
        text.startswith(begin[: len(text)]) for begin in ("<|", "to=", "assistant")
    )
