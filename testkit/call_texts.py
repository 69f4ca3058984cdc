"""Texts with calls, read as a stream of pieces and as a whole."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sidecar.core.events import Event, ToolCallArguments, ToolCallEnded, ToolCallStarted
from sidecar.core.requests import Tool, ToolCall
from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.calls.element_calls import qwen3_coder_xml
from sidecar.output.calls.glm_calls import glm4_native
from sidecar.output.calls.json_calls import hermes_json
from sidecar.output.output_syntax import Markers
from sidecar.output.pieces import CallArguments, CallEnded, CallStarted, Piece
from sidecar.output.reasoning_splitter import StreamSplitter

FORMATS: dict[str, Format] = {
    "hermes_json": hermes_json,
    "qwen3_coder_xml": qwen3_coder_xml,
    "glm4_native": glm4_native,
}


@dataclass
class Read:
    """
    What was read.

    Args:
        calls: names and arguments, as JSON, of whole calls. broken: of broken ones.
        open: of one that has not ended. deltas: the pieces of each call's arguments.
    """

    reasoning: str
    text: str
    calls: list[tuple[str, str]]
    broken: list[tuple[str, str]]
    open: tuple[str, str] | None
    deltas: list[list[str]]
    is_cut: bool = False

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        """The calls with their arguments as values."""
        return [(name, json.loads(text)) for name, text in self.calls]


def collect(pieces: Sequence[Piece], *, is_cut: bool = False) -> Read:
    """Put the pieces of a generation together."""
    read = Read("", "", [], [], None, [], is_cut)
    for piece in pieces:
        if isinstance(piece, CallStarted):
            assert read.open is None, "a call within a call"
            read.open = (piece.name, "")
            read.deltas.append([])
        elif isinstance(piece, CallArguments):
            assert read.open is not None
            assert piece.text
            read.open = (read.open[0], read.open[1] + piece.text)
            read.deltas[-1].append(piece.text)
        elif isinstance(piece, CallEnded):
            assert read.open is not None
            (read.broken if piece.is_broken else read.calls).append(read.open)
            read.open = None
        elif piece[0] == "content":
            read.text += piece[1]
        else:
            read.reasoning += piece[1]
    return read


def split_calls(
    pieces: Sequence[str],
    syntaxes: Sequence[ToolSyntax],
    tools: Sequence[Tool],
    *,
    is_cut: bool = False,
) -> Read:
    """Read a text in these pieces."""
    markers = Markers("<no thinking>", "</no thinking>")
    splitter = StreamSplitter(markers, "off", syntaxes, tools)
    found = [piece for text in pieces for piece in splitter.feed(text)]
    last, is_open = splitter.flush(is_cut=is_cut)
    return collect([*found, *last], is_cut=is_open)


def read_calls(
    text: str,
    syntaxes: Sequence[ToolSyntax],
    tools: Sequence[Tool],
    *,
    is_cut: bool = False,
) -> Read:
    """Read a text whole, and letter by letter with the same result."""
    whole = split_calls([text], syntaxes, tools, is_cut=is_cut)
    letters = split_calls([*text], syntaxes, tools, is_cut=is_cut)
    for name in ("text", "calls", "broken", "open", "is_cut"):
        assert getattr(whole, name) == getattr(letters, name), name
    return whole


def parse(read: Format, body: str, tools: Sequence[Tool]) -> list[tuple[str, Any]]:
    """
    The calls of a block's inside.

    Raises:
        ValueError: it is something else, or has something else in it.
    """
    syntax = ToolSyntax("<x>", "</x>", (read,))
    found = read_calls(f"<x>{body}</x>", [syntax], tools)
    if found.text or found.broken or found.open or not found.calls:
        raise ValueError(f"no call: {found}")
    return found.parsed


def whole_call(choice: int, index: int, call: ToolCall) -> list[Event]:
    """The events of a call, its arguments in one piece."""
    call = replace(call, arguments=call.arguments or "{}")
    return [
        ToolCallStarted(choice, index, call.id, call.name),
        ToolCallArguments(choice, index, call.arguments),
        ToolCallEnded(choice, index, call),
    ]
