"""
Cuts a stream of messages on channels (gpt-oss) into reasoning, content and calls.

    HEADER --message token--> BODY (its header tells the kind)
    BODY   --end, call, return or start token--> HEADER

A header with a recipient is a call, one of the channel `analysis` is reasoning, any
other is content. The prompt ends within a header, behind the role. As with
`StreamSplitter`, the result does not depend on how the text was cut into pieces.
"""

import re
from collections.abc import Sequence

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import ToolSyntax
from sidecar.output.calls.offered_tools import OfferedTools
from sidecar.output.calls.reader import CallReader
from sidecar.output.pieces import CallPart, Kind, Piece, held_suffix, joined

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_MAX_HEADER_CHARS = 4096
_RECIPIENT = re.compile(r"\bto=")


class ChannelSplitter:
    """
    Splits one generation. Not thread-safe.

    Args:
        syntax: how calls are written; None: they are content.
        tools: those that were offered.
        begun: the text of an answer that the prompt ends in; "" if it ends in a header.
        is_held: its content is held to a form: what looks like a mark there is text.
    """

    def __init__(
        self,
        syntax: ToolSyntax | None,
        tools: Sequence[Tool],
        begun: str = "",
        *,
        is_held: bool = False,
    ) -> None:
        self._syntax, self._is_held = syntax, is_held
        self._offered = OfferedTools(tools)
        # None: in a header, or in a call
        self._kind: Kind | None = "content" if begun else None
        self._reader: CallReader | None = None
        self._is_unfinished = False
        self._buffer = ""
        self._seam: dict[str, str] = {}  # before the next text of a kind
        self._shown: set[str] = set()  # kinds of which there was some

    @property
    def is_reasoning(self) -> bool:
        """Whether text fed now would, as far as is known, be reasoning."""
        return self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        """Take a piece of generated text; return what can be shown now."""
        self._buffer += text
        pieces: list[Piece] = []
        while (found := self._step()) is not None:
            pieces += found
        return joined(pieces)

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
            pieces += self.feed("")
        rest, self._buffer = self._buffer, ""
        if self._kind is not None:
            pieces += self._emit(self._kind, rest)
        return joined(pieces), self._is_unfinished

    def _step(self) -> list[Piece] | None:
        """Take one header or a part of a body; None: more text is needed."""
        if self._reader is not None:
            return self._call()
        return self._header() if self._kind is None else self._body(self._kind)

    def _call(self) -> list[Piece] | None:
        if self._reader is None or not self._buffer:
            return None
        text, self._buffer = self._buffer, ""
        return self._take_block(self._reader.feed(text))

    def _take_block(self, parts: Sequence[CallPart]) -> list[Piece]:
        reader = self._reader
        if reader is not None and reader.is_done:
            self._reader = None
            self._is_unfinished = reader.is_unfinished
            self._kind = None if reader.has_calls else "content"
            self._buffer = reader.plain + reader.rest
        return [*parts]

    def _header(self) -> list[Piece] | None:
        header, found, rest = self._buffer.partition(_MESSAGE)
        may_end = 0 if found else len(_MESSAGE) - 1  # what may be half of the token
        if len(header) - may_end > _MAX_HEADER_CHARS or _is_no_header(header):
            self._kind = "content"
            return []
        if not found:
            return None
        self._buffer = rest
        recipient = _RECIPIENT.search(header)
        if recipient and self._syntax:
            self._reader = CallReader(self._syntax, recipient.group(), self._offered)
            self._buffer = header[recipient.end() :] + _MESSAGE + rest
        elif "<|channel|>analysis" in header:
            self._kind = "reasoning"
        else:
            self._kind = "content"
        return []

    def _body(self, kind: Kind) -> list[Piece] | None:
        ends = () if self._is_held and kind == "content" else _ENDS
        end = _END.search(self._buffer) if ends else None
        if end is None:
            keep = held_suffix(self._buffer, ends)
            free = self._buffer[: len(self._buffer) - keep]
            if not free:
                return None
            self._buffer = self._buffer[len(free) :]
            return self._emit(kind, free)
        text, self._buffer = self._buffer[: end.start()], self._buffer[end.end() :]
        pieces = self._emit(kind, text)
        if kind in self._shown:
            self._seam[kind] = "\n"
        self._kind = None
        return pieces

    def _emit(self, kind: Kind, text: str) -> list[Piece]:
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
