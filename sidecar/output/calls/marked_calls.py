"""Calls as a name, a mark and a JSON object."""

import re

from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.json_text import read_object
from sidecar.output.calls.scanner import NotThisFormat, Wait

_NAME = re.compile(r"[\w.:/-]*")
_ID = re.compile(r"\w*")
_MAX_HEADER_CHARS = 4096
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?(?P<name>[\w.:/-]+?)(?::\d+)?\s*")
_RECIPIENT = re.compile(r"(?:functions\.)?(?P<name>[^\s<|]+)")


def mistral(block: Block) -> Wait[None]:
    """`NAME[ARGS]{..}`, maybe `[CALL_ID]ID` between; older ones write JSON objects."""
    scan = block.scan
    while True:
        behind = scan.at
        block.mark()
        yield from scan.space()
        name = yield from scan.run(_NAME)
        if name and (yield from scan.take("[CALL_ID]")):
            yield from scan.run(_ID)
            yield from scan.space()
        if not name or not (yield from scan.take("[ARGS]")):
            scan.at = behind  # what follows is no call
            break
        yield from _call(block, name)


def kimi(block: Block) -> Wait[None]:
    """`functions.NAME:N`, a mark and an object, each call between two marks."""
    scan = block.scan
    yield from scan.space()
    while (yield from scan.take("<|tool_call_begin|>")):
        mark = "<|tool_call_argument_begin|>"
        found = _KIMI_NAME.fullmatch((yield from scan.through(mark, _MAX_HEADER_CHARS)))
        if found is None:
            raise NotThisFormat("no name")
        yield from _call(block, found["name"], "<|tool_call_end|>")
        yield from scan.space()
        yield from scan.take("<|tool_call_end|>")
        block.mark()
        yield from scan.space()


def deepseek(block: Block) -> Wait[None]:
    """`NAME<｜tool▁sep｜>{..}`, or a fence behind the name, each call between marks."""
    scan = block.scan
    yield from scan.space()
    while (yield from scan.take("<｜tool▁call▁begin｜>")):
        name = yield from scan.through("<｜tool▁sep｜>", _MAX_HEADER_CHARS)
        is_bare = (yield from scan.space()) == "{"
        is_fenced = not is_bare and not (yield from scan.stands(_DEEPSEEK_END))
        if is_fenced:
            name = yield from scan.through("```json", _MAX_HEADER_CHARS)
        yield from _call(block, name.strip(), _DEEPSEEK_END)
        yield from scan.space()
        if is_fenced:
            yield from scan.expect("```")
            yield from scan.space()
        yield from scan.expect(_DEEPSEEK_END)
        block.mark()
        yield from scan.space()


def deepseek_fenced(block: Block) -> Wait[None]:
    """The same, by models that write the fence."""
    yield from deepseek(block)


def channels(block: Block) -> Wait[None]:
    """`functions.NAME`, maybe more of a header, `<|message|>` and an object."""
    header = yield from block.scan.through("<|message|>", _MAX_HEADER_CHARS)
    name = _RECIPIENT.match(header)
    if name is None:
        raise NotThisFormat("no recipient")
    yield from _call(block, name["name"])


def _call(block: Block, name: str, end: str = "") -> Wait[None]:
    """
    Read the arguments of a call, be they left out.

    Args:
        end: what stands behind them, if it is not the block's closer.
    """
    scan, sink = block.scan, block.sink
    if (yield from scan.space()) == "{":
        sink.start(name)
        yield from read_object(scan, sink.arguments)
        block.end_call()
        return
    is_over = (end and (yield from scan.stands(end))) or (yield from block.closes())
    if not is_over and (scan.rest or scan.is_cut):
        raise NotThisFormat("arguments must be an object")
    block.take_call(name, "{}")
