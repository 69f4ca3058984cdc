"""Calls as `call:NAME{KEY:VALUE,..}` with marks for quotes, as Gemma writes them."""

import re
from functools import partial

from sidecar.core.json_bytes import MAX_LEVELS
from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.json_text import (
    Print,
    escaped,
    printed,
    read_members,
)
from sidecar.output.calls.scanner import NotThisFormat, Wait
from sidecar.output.calls.unquoted_values import typed_text

_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"[^:{}\[\],<]*")
# What may stand for a key without quotes, whatever follows it.
PLAIN_KEY = re.compile(r"[^:{}\[\],<>\"|\s](?:[^:{}\[\],<>\"|]*[^:{}\[\],<>\"|\s])?")
_BARE = re.compile(r"[^{}\[\],<]*")
_QUOTES = ("<escape>", '<|"|>')


def gemma(block: Block) -> Wait[None]:
    """One call, or several in a row."""
    scan, sink = block.scan, block.sink
    yield from scan.space()
    while (yield from scan.take("call:")):
        yield from scan.space()
        name = yield from scan.run(_NAME)
        yield from scan.space()
        sink.start(name)
        yield from _object(block, sink.arguments, 0)
        block.end_call()
        yield from scan.space()


def _object(block: Block, show: Print, level: int) -> Wait[None]:
    member = partial(_member, block, show, level + 1)
    yield from read_members(block.scan, show, "{}", member)


def _member(block: Block, show: Print, level: int) -> Wait[None]:
    quote = yield from _quote(block)
    if quote:
        pieces: list[str] = []
        yield from _quoted(block, quote, pieces.append)
        key = "".join(pieces)
    else:
        key = printed((yield from block.scan.run(_KEY)).strip())
    yield from block.scan.space()
    yield from block.scan.expect(":")
    show(f"{key}: ")
    yield from _value(block, show, level)


def _value(block: Block, show: Print, level: int) -> Wait[None]:
    if level > MAX_LEVELS:
        raise NotThisFormat("nested too deep")
    first = yield from block.scan.space()
    if first == "{":
        yield from _object(block, show, level)
    elif first == "[":
        value = partial(_value, block, show, level + 1)
        yield from read_members(block.scan, show, "[]", value)
    elif quote := (yield from _quote(block)):
        yield from _quoted(block, quote, show)
    else:
        text = yield from block.scan.run(_BARE)
        yield from block.scan.following()
        if not text.strip():
            raise NotThisFormat("no value")
        show(typed_text(text.strip(), is_python=True))


def _quote(block: Block) -> Wait[str]:
    """The mark that stands here for a quote, taken; "" if none does."""
    for quote in _QUOTES:
        if (yield from block.scan.take(quote)):
            return quote
    return ""


def _quoted(block: Block, quote: str, show: Print) -> Wait[None]:
    """Read a text up to the next mark; within it there is no way to write one."""

    def show_escaped(piece: str) -> None:
        show(escaped(piece))

    show('"')
    yield from block.scan.until(quote, show_escaped)
    show('"')
