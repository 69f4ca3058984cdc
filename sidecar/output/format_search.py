"""In which format of calls a text is written."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class FoundCall:
    """The first call of an answer, and what is left of the answer as text."""

    name: str
    arguments: dict[str, Any]
    text: str


def read_call(
    syntax: OutputSyntax, text: str, tools: Sequence[Tool]
) -> FoundCall | None:
    """The first call of one of these tools in a whole answer; None: there is none."""
    splitter = new_splitter(syntax, "off", tools)
    names, name, said, left = {tool.name for tool in tools}, "", "", ""
    calls: list[tuple[str, dict[str, Any]]] = []
    for piece in [*splitter.feed(text), *splitter.flush(is_cut=False)[0]]:
        if isinstance(piece, CallStarted):
            name, said = piece.name, ""
        elif isinstance(piece, CallArguments):
            said += piece.text
        elif isinstance(piece, CallEnded):
            if not piece.is_broken and name in names:
                calls.append((name, json.loads(said or "{}")))
        else:
            left += piece[1]
    return FoundCall(*calls[0], left) if calls else None


def find_parser(syntax: OutputSyntax, text: str, tools: Sequence[Tool]) -> str | None:
    """
    The format of the first call in a text; None: none reads one.

    Several read most texts. It is the one that leaves the least of it as text, then
    that which would have written it so, then the model's own.

    Args:
        syntax: the model's; its thinking is kept.
    """
    bare, own = _SPACE.sub("", text), parser_of(syntax.calls)
    costs: dict[str, tuple[int, bool, bool]] = {}  # the least first
    for name, calls in TOOL_PARSERS.items():
        alone = replace(syntax, calls=calls, has_channels=False)
        call, write = read_call(alone, text, tools), writer_of(calls)
        if call is None or write is None:
            continue
        written = _SPACE.sub("", write(call.name, call.arguments))
        costs[name] = len(call.text), written not in bare, name != own
    return min(costs, key=costs.__getitem__) if costs else None
