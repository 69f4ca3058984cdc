"""Formats that only mlx-lm has a parser for, which takes a whole block."""

from collections.abc import Callable, Sequence
from typing import Any

from sidecar.output.calls.call_sink import Block, Format
from sidecar.output.calls.json_text import object_of, printed
from sidecar.output.calls.scanner import NotThisFormat, Wait


def from_library(parse: Callable[..., Any]) -> Format:
    """Wrap a parser of mlx-lm: `parse(text, tools)` to a call dict, or several."""

    def read(block: Block) -> Wait[None]:
        pieces: list[str] = []
        if block.closer:
            yield from _up_to_closer(block, pieces)
        found = parse("".join(pieces), [dict(tool.raw) for tool in block.tools.all])
        for name, arguments in _calls(found if isinstance(found, list) else [found]):
            block.take_call(name, arguments)

    return read


def _up_to_closer(block: Block, pieces: list[str]) -> Wait[None]:
    """Take what stands before the closer; that is read again."""
    try:
        yield from block.scan.until(block.closer, pieces.append)
    except NotThisFormat:
        if block.scan.is_cut:
            raise
        pieces.append(block.scan.rest)
        block.scan.at = len(block.scan.text)
        return
    block.scan.at -= len(block.closer)


def _calls(found: Sequence[Any]) -> list[tuple[str, str]]:
    """Names and arguments; all of them are looked at before one is shown."""
    calls = []
    for call in found:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            raise NotThisFormat("a call needs a name")
        given = call.get("arguments", call.get("parameters", {}))
        arguments = object_of(given) if isinstance(given, str) else given
        if not isinstance(arguments, dict | type(None)):
            raise NotThisFormat("arguments must be an object")
        calls.append((name, printed(arguments or {})))
    if not calls:
        raise NotThisFormat("no call")
    return calls
