"""Calls as JSON objects, with a name and arguments under the keys that models use."""

from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.json_text import (
    collected,
    object_of,
    printed,
    read_object,
    read_text,
    value_of,
)
from sidecar.output.calls.scanner import NotThisFormat, Wait

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


def hermes_json(block: Block) -> Wait[None]:
    """`{"name": .., "arguments": {..}}`, one or several, or a list of them."""
    scan = block.scan
    first = yield from scan.space()
    while first in ("{", "["):
        if first == "[":
            yield from _list(block)
        else:
            yield from json_call(block)
        block.mark()
        first = yield from scan.space()


def bare_json(block: Block) -> Wait[None]:
    """
    The same without any marker, several after semicolons.

    Only of offered tools: an answer may hold JSON of its own.
    """
    scan = block.scan
    first = yield from scan.space()
    while first == "{":
        yield from json_call(block, is_marked=False)
        behind = scan.at
        if (yield from scan.space()) == ";":
            yield from scan.char()
            behind = scan.at
        block.mark()
        first = yield from scan.space()
        if first != "{":
            scan.at = behind


def _list(block: Block) -> Wait[None]:
    scan = block.scan
    yield from scan.expect("[")
    while (yield from scan.space()) == "{":
        yield from json_call(block)
        block.mark()
        if (yield from scan.space()) == ",":
            yield from scan.char()
    yield from scan.expect("]")


class _Call:
    """What is known of a call while its object is read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.held: str | None = None  # its arguments, before its name is known
        self.is_done = False


def json_call(block: Block, *, is_marked: bool = True) -> Wait[None]:
    """
    Read one object; its last brace may be missing.

    Args:
        is_marked: a marker stands before it; else it is a call of an offered tool only.
    """
    call = _Call()
    yield from _members(block, call, is_marked=is_marked)
    if call.is_done:
        return
    if call.name is None:
        raise NotThisFormat("a call needs a name")
    block.sink.call(call.name, call.held or "{}")


def _members(
    block: Block, call: _Call, *, is_marked: bool, is_inner: bool = False
) -> Wait[None]:
    scan = block.scan
    yield from scan.expect("{")
    while (yield from scan.space()) != "}":
        key = yield from read_text(scan)
        yield from scan.space()
        yield from scan.expect(":")
        first = yield from scan.space()
        if key in _NAMES and call.name is None:
            call.name = yield from read_text(scan)
            if not is_marked and not block.is_offered(call.name):
                raise NotThisFormat("not an offered tool")
        elif key in _ARGUMENTS and not call.is_done and call.held is None:
            yield from _arguments(block, call)
        elif key == "function" and first == "{" and not is_inner:
            yield from _members(block, call, is_marked=is_marked, is_inner=True)
        else:
            yield from collected(scan)
        after = yield from scan.space()
        if after == ",":
            yield from scan.char()
        elif after != "}" and call.is_done:
            return  # the last brace is missing
        elif after != "}":
            raise NotThisFormat("no object")
    yield from scan.expect("}")


def _arguments(block: Block, call: _Call) -> Wait[None]:
    """Read an object, the text of one, or null."""
    scan, sink = block.scan, block.sink
    first = yield from scan.space()
    if call.name is not None and first == "{":
        sink.start(call.name)
        yield from read_object(scan, sink.arguments)
        sink.end()
        call.is_done = True
        return
    text = yield from _whole_arguments(block, first)
    if call.name is None:
        call.held = text
    else:
        sink.call(call.name, text)
        call.is_done = True


def _whole_arguments(block: Block, first: str) -> Wait[str]:
    if first in ('"', "'"):
        return printed(object_of((yield from read_text(block.scan))))
    text = yield from collected(block.scan)
    return "{}" if value_of(text) is None else printed(object_of(text))
