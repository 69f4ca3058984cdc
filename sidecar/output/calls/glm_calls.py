"""Calls as a name and marked arguments, as GLM writes them."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.json_text import printed, read_object
from sidecar.output.calls.scanner import NotThisFormat, Wait
from sidecar.output.calls.tool_schema import ANY_TYPE
from sidecar.output.calls.unquoted_values import read_held_value, read_raw_value

_NAME = re.compile(r"[\w.:/-]*")
_MAX_NAME_CHARS = 512


def glm4_native(block: Block) -> Wait[None]:
    """
    `NAME<arg_key>K</arg_key><arg_value>V</arg_value>..`.

    Or `NAME<K>V</K>..`, or `NAME<K="V"</K>..`. A name alone is a call of an offered
    tool if the block ends behind it.
    """
    yield from _call(block, "")


def longcat(block: Block) -> Wait[None]:
    """The same with LongCat's own tags."""
    yield from _call(block, "longcat_")


def glm4_xml(block: Block) -> Wait[None]:
    """`<name>NAME</name><arguments>{..}</arguments>`."""
    scan, sink = block.scan, block.sink
    yield from scan.space()
    yield from scan.expect("<name>")
    name = yield from scan.through("</name>", _MAX_NAME_CHARS)
    yield from scan.space()
    yield from scan.expect("<arguments>")
    sink.start(name.strip())
    yield from read_object(scan, sink.arguments)
    yield from scan.space()
    yield from scan.expect("</arguments>")
    block.end_call()


def _call(block: Block, prefix: str) -> Wait[None]:
    scan, sink = block.scan, block.sink
    yield from scan.space()
    name = yield from scan.run(_NAME)
    if not name or (name[0].isdigit() and not block.tools.has(name)):
        raise NotThisFormat("no function name")
    behind = yield from scan.space()
    if not behind or (yield from block.closes()):
        if scan.is_cut or not block.tools.has(name):
            raise NotThisFormat("a bare word is a call only if it is a tool")
        block.take_call(name, "{}")
        return
    between, given = "{", set[str]()
    while (yield from scan.space()) == "<" and not (yield from block.closes()):
        key = yield from _key(block, prefix)
        if between == "{":
            sink.start(name)
        sink.arguments(f"{between}{printed(key.name)}: ")
        given.add(key.name)
        yield from _value(block, name, key, prefix, given)
        between = ", "
    if between == "{":
        raise NotThisFormat("no argument element")
    sink.arguments("}")
    block.end_call()


@dataclass(frozen=True, slots=True)
class _Key:
    """
    What stands before a value.

    Args:
        end: what ends the value. is_marked: the name stands between tags of its own.
    """

    name: str
    end: str
    is_marked: bool = False


def _key(block: Block, prefix: str) -> Wait[_Key]:
    scan = block.scan
    if (yield from scan.take(f"<{prefix}arg_key>")):
        name = yield from scan.through(f"</{prefix}arg_key>", _MAX_NAME_CHARS)
        yield from scan.space()
        yield from scan.expect(f"<{prefix}arg_value>")
        return _Key(name.strip(), f"</{prefix}arg_value>", is_marked=True)
    yield from scan.expect("<")
    name = yield from scan.run(_NAME)
    if not name or name[0] == "/":
        raise NotThisFormat("no argument element")
    if (yield from scan.take(">")):
        return _Key(name, f"</{name}>")
    yield from scan.expect('="')
    return _Key(name, f'"</{name}>')


def _value(
    block: Block, name: str, key: _Key, prefix: str, given: Collection[str]
) -> Wait[None]:
    """
    Read an argument up to its end.

    Args:
        given: the arguments so far: none is given twice.
    """
    scan, show = block.scan, block.sink.arguments
    types = block.tools.types_of(name).get(key.name, ANY_TYPE)
    if block.tools.are_held:
        choices = block.tools.text_choices(name, key.name)
        yield from read_held_value(scan, show, key.end, types, choices)
        return

    def is_followed() -> Wait[bool]:
        is_line = scan.begins_line
        next_key = yield from _key(block, prefix)
        if next_key.name in given or next_key.is_marked != key.is_marked:
            return False
        if block.tools.declares(name, next_key.name):
            return True
        # Its tags are all that tells it from a text, or else the line that it begins.
        return (is_line or key.is_marked) and block.tools.may_have(name)

    yield from read_raw_value(
        scan,
        show,
        key.end,
        lambda: block.goes_on(is_followed()),
        types=types,
        is_padded=False,
    )
