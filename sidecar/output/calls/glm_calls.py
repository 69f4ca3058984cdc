"""Calls as a name and marked arguments, as GLM writes them."""

import re

from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.json_text import printed, read_object, read_raw_value
from sidecar.output.calls.scanner import NotThisFormat, Wait
from sidecar.output.calls.tool_schema import ANY_TYPE

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
    between = "{"
    while (yield from scan.space()) == "<" and not (yield from block.closes()):
        key, end = yield from _key(block, prefix)
        if between == "{":
            sink.start(name)
        sink.arguments(f"{between}{printed(key)}: ")
        yield from _value(block, name, key, end, prefix)
        between = ", "
    if between == "{":
        raise NotThisFormat("no argument element")
    sink.arguments("}")
    block.end_call()


def _key(block: Block, prefix: str) -> Wait[tuple[str, str]]:
    """Read what stands before a value: its name, and what ends it."""
    scan = block.scan
    if (yield from scan.take(f"<{prefix}arg_key>")):
        key = yield from scan.through(f"</{prefix}arg_key>", _MAX_NAME_CHARS)
        yield from scan.space()
        yield from scan.expect(f"<{prefix}arg_value>")
        return key.strip(), f"</{prefix}arg_value>"
    yield from scan.expect("<")
    key = yield from scan.run(_NAME)
    if not key:
        raise NotThisFormat("no argument element")
    if (yield from scan.take(">")):
        return key, f"</{key}>"
    yield from scan.expect('="')
    return key, f'"</{key}>'


def _value(block: Block, name: str, key: str, end: str, prefix: str) -> Wait[None]:
    def is_followed() -> Wait[bool]:
        yield from _key(block, prefix)
        return True

    yield from read_raw_value(
        block.scan,
        block.sink.arguments,
        end,
        lambda: block.goes_on(is_followed()),
        types=block.tools.types_of(name).get(key, ANY_TYPE),
        is_padded=False,
    )
