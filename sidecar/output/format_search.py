"""In which format of calls a text is written."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import ToolSyntax
from sidecar.output.output_syntax import OutputSyntax
from sidecar.output.pieces import CallArguments, CallEnded, CallStarted
from sidecar.output.reasoning_splitter import new_splitter
from sidecar.output.tool_syntax import TOOL_PARSERS
from sidecar.output.written_calls import writer_of

_SPACE = re.compile(r"\s+")


def parser_of(syntaxes: Sequence[ToolSyntax]) -> str:
    """The name of a model's own way to write calls; "": it cannot be set."""
    own = syntaxes[0]
    for name, known in TOOL_PARSERS.items():
        one = known[0]
        if (one.opener, one.formats[:1]) == (own.opener, own.formats[:1]):
            return name
    return ""


def read_call(
    syntax: OutputSyntax, text: str, tools: Sequence[Tool]
) -> tuple[str, dict[str, Any]] | None:
    """The first call of one of these tools in a whole answer; None: there is none."""
    splitter = new_splitter(syntax, "off", tools)
    names, name, said = {tool.name for tool in tools}, "", ""
    for piece in [*splitter.feed(text), *splitter.flush(is_cut=False)[0]]:
        if isinstance(piece, CallStarted):
            name, said = piece.name, ""
        elif isinstance(piece, CallArguments):
            said += piece.text
        elif isinstance(piece, CallEnded) and not piece.is_broken and name in names:
            return name, json.loads(said or "{}")
    return None


def find_parser(syntax: OutputSyntax, text: str, tools: Sequence[Tool]) -> str | None:
    """
    The format of the first call in a text; None: none reads one.

    Several read most texts: it is the one that would have written it so.

    Args:
        syntax: the model's; its thinking is kept.
    """
    first: str | None = None
    bare = _SPACE.sub("", text)
    for name, calls in TOOL_PARSERS.items():
        alone = replace(syntax, calls=calls, has_channels=False)
        call, write = read_call(alone, text, tools), writer_of(calls)
        if call is None:
            continue
        first = first or name
        if write is not None and _SPACE.sub("", write(*call)) in bare:
            return name
    return first
