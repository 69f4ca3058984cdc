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
from sidecar.output.calls.scanner import NotThisFormat, TextEnded, Wait

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
# What may stand beside them and says nothing of what the call is to do.
_BESIDE = ("id", "type", "index", "call_id", "tool_call_id")


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


def json_list(block: Block) -> Wait[None]:
    """A list of them, by models that write nothing else."""
    yield from hermes_json(block)


def mistral_list(block: Block) -> Wait[None]:
    """The same with an id in each, as older Mistrals write it."""
    yield from hermes_json(block)


def cohere_list(block: Block) -> Wait[None]:
    """`[{"tool_call_id": .., "tool_name": .., "parameters": {..}}]`."""
    yield from hermes_json(block)


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
        if (yield from scan.space()) == ",":
            yield from scan.char()
    yield from scan.expect("]")


class _Call:
    """
    What is known of a call while its object is read.

    Args:
        held: its arguments, if they are not shown as they come.
        is_shown: they are. has_arguments: all of them are read.
        unread: a member that is neither its name nor its arguments.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.held: str | None = None
        self.is_shown = False
        self.has_arguments = False
        self.unread: str | None = None


def json_call(block: Block, *, is_marked: bool = True) -> Wait[None]:
    """
    Read one object; its last brace may be missing.

    Args:
        is_marked: a marker stands before it; else it is a call of an offered tool only.
    """
    call = _Call()
    try:
        yield from _members(block, call, is_marked=is_marked)
    except TextEnded:
        if not call.has_arguments:
            raise
    if call.name is None:
        raise NotThisFormat("a call needs a name")
    if call.is_shown:
        block.end_call()
    elif call.held is None and call.unread is not None:
        # Without what the model said under a name of its own it could be run as it is.
        raise NotThisFormat(f"its arguments may be {call.unread!r}")
    else:
        block.take_call(call.name, call.held or "{}")


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
            if not is_marked and not block.tools.has(call.name):
                raise NotThisFormat("not an offered tool")
        elif key in _ARGUMENTS:
            yield from _arguments(block, call)
        elif key == "function" and first == "{" and not is_inner:
            yield from _members(block, call, is_marked=is_marked, is_inner=True)
        else:
            yield from collected(scan)
            call.unread = key if key not in _BESIDE else call.unread
        after = yield from scan.space()
        if after == ",":
            yield from scan.char()
        elif after != "}" and call.has_arguments:
            return  # the last brace is missing
        elif after != "}":
            raise NotThisFormat("no object")
    yield from scan.expect("}")


def _arguments(block: Block, call: _Call) -> Wait[None]:
    """
    Read an object, the text of one, or null, which is as if they were not there.

    Raises:
        NotThisFormat: it has some already: nothing says which are meant.
    """
    scan, sink = block.scan, block.sink
    first = yield from scan.space()
    if call.has_arguments:
        raise NotThisFormat("a call has arguments once")
    if call.name is not None and first == "{":
        sink.start(call.name)
        call.is_shown = True
        yield from read_object(scan, sink.arguments)
    elif first in ('"', "'"):
        call.held = printed(object_of((yield from read_text(scan))))
    else:
        text = yield from collected(scan)
        call.held = None if value_of(text) is None else printed(object_of(text))
    call.has_arguments = call.is_shown or call.held is not None
