"""Calls as Python expressions, which are read and never run."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.json_text import joined_object, printed
from sidecar.output.calls.offered_tools import OfferedTools
from sidecar.output.calls.python_names import OddNames
from sidecar.output.calls.scanner import NotThisFormat, Scanner, Wait

_OPENING, _CLOSING = "([{", ")]}"
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_CHARS = 1_000_000
_PLAIN = re.compile(r"[^\"'()\[\]{}#]*")
_COMMENT = re.compile(r"[^\n]*")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|$)")
_BEGUN = re.compile(r"\s*\[?\s*(?:print\(\s*)?([\w.-]+)\s*\(\s*[^\s)]")
_IN_STRING = re.compile(r"[^\"'\\]*")


def python_calls(block: Block) -> Wait[None]:
    """`[f(a="x"), g()]`, or calls one after another; positional arguments by order."""
    scan = block.scan
    while (yield from scan.space()) and not (yield from block.closes()):
        start = scan.at
        try:
            expression = yield from _expression(scan)
        except NotThisFormat:
            _note_begun(block, scan.text[start:])
            raise
        for name, arguments in _read_all(expression, block.tools):
            block.take_call(name, arguments)
        if (yield from scan.space()) in (";", ","):
            yield from scan.char()


def tool_code(block: Block) -> Wait[None]:
    """The same in a fence of Markdown."""
    yield from python_calls(block)


def _note_begun(block: Block, source: str) -> None:
    """Have it known that a call is cut behind the beginning of its arguments."""
    begun = _BEGUN.match(source)
    if begun and block.sink.is_offered(begun[1]):
        block.sink.hold(begun[1])


def _expression(scan: Scanner) -> Wait[str]:
    """Take what ends where the brackets that it opens are closed."""
    start, depth = scan.at, 0
    while True:
        if depth:
            yield from scan.run(_PLAIN)
        char = yield from scan.char()
        if char in "\"'":
            yield from _string(scan, char)
        elif char == "#" and depth:
            yield from scan.run(_COMMENT)
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
            if depth <= 0:
                return scan.text[start : scan.at]
        elif depth == 0 and not (char.isalnum() or char in "._- "):
            raise NotThisFormat("no call")
        if scan.at - start > _MAX_CHARS:
            raise NotThisFormat("too long")


def _string(scan: Scanner, quote: str) -> Wait[None]:
    """Skip a string whose first quote was taken."""
    end = quote
    if (yield from scan.take(quote * 2)):
        end = quote * 3
    while not (yield from scan.take(end)):
        if (yield from scan.char()) == "\\":
            yield from scan.char()
        yield from scan.run(_IN_STRING)


def _read_all(source: str, tools: OfferedTools) -> list[tuple[str, str]]:
    """Names and arguments, as JSON, of all calls of an expression."""
    said = _Source(source.strip(), tools.odd_names)
    found = ast.parse(said.text, mode="eval").body
    items = found.elts if isinstance(found, ast.List | ast.Tuple) else [found]
    if not items:
        raise NotThisFormat("no call")
    return [_read(_printed_call(item), tools.all, said) for item in items]


class _Source:
    """
    A text that is parsed, by the nodes that are found in it.

    Args:
        odd: of each name that Python does not take, `text` has a stand-in.
    """

    def __init__(self, text: str, odd: OddNames) -> None:
        self._odd, self._mark = odd, odd.mark_for(text)
        self.text = odd.replaced(text, self._mark)
        # Of lines as Python counts them: at form feeds no new one begins.
        self._lines = _LINE.findall(self.text.encode())

    def name_of(self, written: str) -> str:
        """The name that a name in the text stands for."""
        return self._odd.restored(written, self._mark)

    def text_of(self, node: ast.expr) -> str:
        """What stands there; nodes count bytes."""
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        lines = self._lines[first : last + 1]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return self._odd.restored(b"".join(lines).decode(), self._mark)


def _printed_call(item: ast.expr) -> ast.Call:
    """A call; that within `print(..)`, which models write around it."""
    if not isinstance(item, ast.Call):
        raise NotThisFormat("no call")
    is_print = isinstance(item.func, ast.Name) and item.func.id == "print"
    inner = item.args[0] if is_print and len(item.args) == 1 else None
    return inner if isinstance(inner, ast.Call) else item


def _read(call: ast.Call, tools: Sequence[Tool], source: _Source) -> tuple[str, str]:
    """The name of a call and its arguments as JSON."""
    name = source.name_of(_dotted(call.func))
    members = [*_positional(name, call.args, tools, source)]
    for keyword in call.keywords:
        if keyword.arg is None:
            members += _spelled_out(keyword.value, source)
        else:
            members.append((source.name_of(keyword.arg), _json(keyword.value, source)))
    if len({key for key, _ in members}) < len(members):
        raise NotThisFormat("an argument is given twice")
    return name, joined_object(members)


def _spelled_out(value: ast.expr, source: _Source) -> list[tuple[str, str]]:
    """The members of `**{"a-b": 1}`."""
    if not isinstance(value, ast.Dict) or not all(map(_is_key, value.keys)):
        raise NotThisFormat("arguments that are not spelled out")
    keys = [ast.literal_eval(key) for key in value.keys if key]
    return [(k, _json(v, source)) for k, v in zip(keys, value.values, strict=True)]


def _positional(
    name: str, values: Sequence[ast.expr], tools: Sequence[Tool], source: _Source
) -> list[tuple[str, str]]:
    """Arguments without names, by the order in which the tool's schema has them."""
    if not values:
        return []
    tool = next((tool for tool in tools if tool.name == name), None)
    properties = tool.parameters.get("properties") if tool else None
    names = [*properties] if isinstance(properties, dict) else []
    if len(names) < len(values):
        raise NotThisFormat("an argument has no name")
    if any(isinstance(value, ast.Starred) for value in values):
        raise NotThisFormat("arguments that are not spelled out")
    return [(key, _json(v, source)) for key, v in zip(names, values, strict=False)]


def _dotted(func: ast.expr) -> str:
    if isinstance(func, ast.Attribute):
        return f"{_dotted(func.value)}.{func.attr}"
    if isinstance(func, ast.Name):
        return func.id
    raise NotThisFormat("no function name")


def _json(value: ast.expr, source: _Source) -> str:
    """A literal as JSON; what is none as its source text."""
    return printed(_value(value, source))


def _value(node: ast.expr, source: _Source) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, source) for item in node.elts]
    if isinstance(node, ast.Dict) and all(_is_key(key) for key in node.keys):
        keys = [ast.literal_eval(key) for key in node.keys if key]
        values = [_value(one, source) for one in node.values]
        return dict(zip(keys, values, strict=True))
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return source.text_of(node)
    is_json = isinstance(value, str | int | float | bool) or value is None
    return value if is_json else source.text_of(node)


def _is_key(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
