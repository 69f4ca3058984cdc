"""
The formats in which models write tool calls, one pure function each.

A parser takes the inside of one call block and the offered tools, and returns the
calls it holds, in order. It raises ValueError where the block is not its format or
is cut short. Nothing of a block is ever executed.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sidecar.core.requests import Tool


class ParsedCall(NamedTuple):
    """A call as the model wrote it: a name and named arguments."""

    name: str
    arguments: dict[str, Any]


FormatParser = Callable[[str, Sequence[Tool]], list[ParsedCall]]

_ANY = re.IGNORECASE
_FUNCTION = re.compile(r"<function=([^<>\s]+)\s*>(.*?)</function>", _ANY | re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)\s*>(.*?)</parameter>", _ANY | re.DOTALL)
_ARG = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", _ANY | re.DOTALL
)
_NAMED = re.compile(r"<([A-Za-z_][\w.-]*)>(.*?)</\1>", re.DOTALL)
_QUOTED = re.compile(r'<([A-Za-z_][\w.-]*)="(.*?)"</\1>', re.DOTALL)
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
    calls = []
    for match in _FUNCTION.finditer(body):
        name, inside = match.groups()
        pairs = _PARAMETER.findall(inside)
        require_nothing_left(_PARAMETER.sub("", inside))
        calls.append(_typed_call(name, pairs, tools))
    if not calls:
        raise ValueError("no function element")
    require_nothing_left(_FUNCTION.sub("", body))
    return calls


def glm4_native(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`NAME<arg_key>K</arg_key><arg_value>V</arg_value>..`, or `NAME<K>V</K>..`."""
    head = _NAME.match(body)
    if head is None:
        raise ValueError("no function name")
    name, inside = head.group(1), body[head.end() :]
    for pattern in (_ARG, _QUOTED, _NAMED):
        pairs = [(key.strip(), value) for key, value in pattern.findall(inside)]
        if pairs:
            require_nothing_left(pattern.sub("", inside))
            return [_typed_call(name, pairs, tools)]
    if not inside.strip() and any(tool.name == name for tool in tools):
        return [ParsedCall(name, {})]  # a bare word is a call only if it is a tool
    raise ValueError("no argument element")


def from_library(parse: Callable[..., Any]) -> FormatParser:
    """Wrap a parser of mlx-lm: `parse(text, tools)` to a call dict, or several."""

    def parser(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
        found = parse(body, [dict(tool.raw) for tool in tools])
        return [_json_call(c) for c in (found if isinstance(found, list) else [found])]

    return parser


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
        at = end + (len(text[end:]) - len(text[end:].lstrip()))
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
    except (ValueError, RecursionError):
        return text


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")  # Python's parser takes NaN and Infinity


def _finite(text: str) -> float:
    value = float(text)
    if value in (math.inf, -math.inf):
        raise ValueError("a number too large for JSON's readers")
    return value
