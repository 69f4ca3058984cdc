"""In which format of calls a text is written."""

from collections.abc import Sequence
from dataclasses import replace

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import ToolSyntax
from sidecar.output.output_syntax import OutputSyntax
from sidecar.output.pieces import CallEnded, CallStarted
from sidecar.output.reasoning_splitter import new_splitter
from sidecar.output.tool_syntax import TOOL_PARSERS


def parser_of(syntaxes: Sequence[ToolSyntax]) -> str:
    """The name of a model's own way to write calls; "": it cannot be set."""
    own = syntaxes[0]
    for name, known in TOOL_PARSERS.items():
        one = known[0]
        if (one.opener, one.formats[:1]) == (own.opener, own.formats[:1]):
            return name
    return ""


def is_read(syntax: OutputSyntax, text: str, tools: Sequence[Tool]) -> bool:
    """Whether a whole answer is read as a call of one of these tools."""
    splitter = new_splitter(syntax, "off", tools)
    pieces = [*splitter.feed(text), *splitter.flush(is_cut=False)[0]]
    names = {tool.name for tool in tools}
    is_meant = any(isinstance(p, CallStarted) and p.name in names for p in pieces)
    ends = [piece for piece in pieces if isinstance(piece, CallEnded)]
    return is_meant and bool(ends) and not any(end.is_broken for end in ends)


def find_parser(syntax: OutputSyntax, text: str, tools: Sequence[Tool]) -> str | None:
    """
    The first format that reads a call in a text; None: none does.

    Args:
        syntax: the model's; its thinking is kept.
    """
    for name, calls in TOOL_PARSERS.items():
        if is_read(replace(syntax, calls=calls, has_channels=False), text, tools):
            return name
    return None
