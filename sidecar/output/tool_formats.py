"""
The formats in which models write tool calls, one pure function each.

A parser takes the inside of one call block and the offered tools, and returns the
calls it holds, in order. It raises ValueError where the block is not its format or
is cut short. Nothing of a block is ever executed.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sidecar.core.json_bytes import load_json
from sidecar.core.requests import Tool

_MAX_UNCLOSED = 64
Closer = Callable[[re.Match[str]], re.Pattern[str]]
Element = tuple[re.Match[str], str]  # the opener, what stands inside


def cut_elements(
    text: str, opener: re.Pattern[str], closer: re.Pattern[str] | Closer
) -> tuple[list[Element], str]:
    """
    What `opener(.*?)closer` finds in a text, and all text that it does not.

    As one pattern that would be searched for to the end behind each opener that
    nothing closes.

    Args:
        closer: or what gives the closer of an opener; then text with many openers
            that nothing closes is no such markup.
    Raises:
        ValueError: it is none.
    """
    elements: list[Element] = []
    rest: list[str] = []
    at = 0
    for begun, ended in _pairs(text, opener, closer):
        elements.append((begun, text[begun.end() : ended.start()]))
        rest.append(text[at : begun.start()])
        at = ended.end()
    return elements, "".join([*rest, text[at:]])


def _pairs(
    text: str, opener: re.Pattern[str], closer: re.Pattern[str] | Closer
) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    at, num_unclosed = 0, 0
    while begun := opener.search(text, at):
        closes = closer if isinstance(closer, re.Pattern) else closer(begun)
        ended = closes.search(text, begun.end())
        if ended is not None:
            yield begun, ended
            at = ended.end()
        elif isinstance(closer, re.Pattern):
            return  # nor are those behind it
        else:
            at = begun.start() + 1
            num_unclosed += 1
            if num_unclosed > _MAX_UNCLOSED:
                raise ValueError("elements that nothing closes")


def texts(elements: Sequence[Element]) -> list[tuple[str, str]]:
    """(first group of the opener, inside) of each element."""
    return [(begun.group(1), inside) for begun, inside in elements]


class ParsedCall(NamedTuple):
    """A call as the model wrote it: a name and named arguments."""

    name: str
    arguments: dict[str, Any]


FormatParser = Callable[[str, Sequence[Tool]], list[ParsedCall]]


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """
    How one model writes calls.

    Args:
        opener, closer: what stands around a block; closer "" means "to the next
            opener or the end".
        formats: parsers of a block's inside, tried in order.
    """

    opener: str
    closer: str
    formats: tuple[FormatParser, ...]


_ANY = re.IGNORECASE
_FUNCTION = re.compile(r"<function=([^<>\s]+)\s*>", _ANY)
_END_OF_FUNCTION = re.compile("</function>", _ANY)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)\s*>", _ANY)
_END_OF_PARAMETER = re.compile("</parameter>", _ANY)
_KEY = re.compile("<arg_key>", _ANY)
_KEY_TO_VALUE = re.compile(r"</arg_key>\s*<arg_value>", _ANY)
_END_OF_VALUE = re.compile("</arg_value>", _ANY)
_NAMED = re.compile(r"<([A-Za-z_][\w.-]*)>")
_QUOTED = re.compile(r'<([A-Za-z_][\w.-]*)="')
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"\s*([A-Za-z_][\w.:/-]*)\s*")


def hermes_json(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`{"name": .., "arguments": {..}}`, one or several, or a list of them."""
    calls = []
    for value in _json_values(body):
        for item in value if isinstance(value, list) else [value]:
            calls.append(_json_call(item))
    return calls


def qwen3_coder_xml(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`<function=NAME><parameter=KEY>VALUE</parameter>..</function>`, one or more."""
    functions, rest = cut_elements(body, _FUNCTION, _END_OF_FUNCTION)
    calls = []
    for name, inside in texts(functions):
        parameters, between = cut_elements(inside, _PARAMETER, _END_OF_PARAMETER)
        require_nothing_left(between)
        calls.append(_typed_call(name, texts(parameters), tools))
    if not calls:
        raise ValueError("no function element")
    require_nothing_left(rest)
    return calls


def glm4_native(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`NAME<arg_key>K</arg_key><arg_value>V</arg_value>..`, or `NAME<K>V</K>..`."""
    head = _NAME.match(body)
    if head is None:
        raise ValueError("no function name")
    name, inside = head.group(1), body[head.end() :]
    for cut in (_cut_pairs, _cut_quoted, _cut_named):
        pairs, rest = cut(inside)
        if pairs:
            require_nothing_left(rest)
            stripped = [(key.strip(), value) for key, value in pairs]
            return [_typed_call(name, stripped, tools)]
    if not inside.strip() and any(tool.name == name for tool in tools):
        return [ParsedCall(name, {})]  # a bare word is a call only if it is a tool
    raise ValueError("no argument element")


_Pairs = list[tuple[str, str]]


def _cut_pairs(text: str) -> tuple[_Pairs, str]:
    """`<arg_key>K</arg_key><arg_value>V</arg_value>`."""
    pairs: _Pairs = []
    rest: list[str] = []
    at = 0
    while key := _KEY.search(text, at):
        middle = _KEY_TO_VALUE.search(text, key.end())
        end = _END_OF_VALUE.search(text, middle.end()) if middle else None
        if middle is None or end is None:
            break
        pairs.append(
            (text[key.end() : middle.start()], text[middle.end() : end.start()])
        )
        rest.append(text[at : key.start()])
        at = end.end()
    return pairs, "".join([*rest, text[at:]])


def _cut_quoted(text: str) -> tuple[_Pairs, str]:
    """`<K="V"</K>`."""
    found, rest = cut_elements(
        text, _QUOTED, lambda begun: re.compile(re.escape(f'"</{begun.group(1)}>'))
    )
    return texts(found), rest


def _cut_named(text: str) -> tuple[_Pairs, str]:
    """`<K>V</K>`."""
    found, rest = cut_elements(
        text, _NAMED, lambda begun: re.compile(re.escape(f"</{begun.group(1)}>"))
    )
    return texts(found), rest


def from_library(parse: Callable[..., Any]) -> FormatParser:
    """Wrap a parser of mlx-lm: `parse(text, tools)` to a call dict, or several."""

    def parser(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
        found = parse(body, [dict(tool.raw) for tool in tools])
        return [_json_call(c) for c in (found if isinstance(found, list) else [found])]

    return parser


def end_of_space(text: str, at: int) -> int:
    """Where the white space that begins at a place ends."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def require_nothing_left(text: str) -> None:
    """ValueError if there is text between the elements of a call."""
    if text.strip():
        raise ValueError("text between the elements of a call")


FORMATS: dict[str, FormatParser] = {
    "hermes_json": hermes_json,
    "qwen3_coder_xml": qwen3_coder_xml,
    "glm4_native": glm4_native,
}


def _json_values(text: str) -> list[Any]:
    """All JSON values of `text`, white space between them."""
    # Models write raw newlines in strings.
    decoder = json.JSONDecoder(
        strict=False, parse_constant=_no_constant, parse_float=_finite
    )
    values, at = [], 0
    text = text.strip()
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        values.append(value)
        at = end_of_space(text, end)
    if not values:
        raise ValueError("empty call block")
    return values


def _json_call(value: Any) -> ParsedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call needs a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not value["name"] or not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return ParsedCall(value["name"], arguments)


def _typed_call(
    name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Tool]
) -> ParsedCall:
    types = _declared_types(name, tools)
    arguments = {key: _typed(text, types.get(key)) for key, text in pairs}
    return ParsedCall(name, arguments)


def _declared_types(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    for tool in tools:
        properties = tool.parameters.get("properties")
        if tool.name == name and isinstance(properties, dict):
            return {k: v.get("type") for k, v in properties.items() if _is_schema(v)}
    return {}


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict)


def _typed(text: str, declared: Any) -> Any:
    """A declared string stays text; anything else is JSON if it parses."""
    text = text.removeprefix("\n").removesuffix("\n")
    if declared == "string":
        return text
    try:
        return _json(text)
    except ValueError:  # or nested too deep
        return text


def _json(text: str) -> Any:
    return load_json(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")  # Python's parser takes NaN and Infinity


def _finite(text: str) -> float:
    value = float(text)
    if value in (math.inf, -math.inf):
        raise ValueError("a number too large for JSON's readers")
    return value
