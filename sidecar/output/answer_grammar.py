"""
The grammar that an answer must keep to, as Lark text for llguidance.

White space is bounded: with JSON's own a model may write newlines for ever. What is one
token in the vocabulary (`<tool_call>`) must be named as that token: as a text the
grammar would let the token through and then fail on it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidecar.core.requests import OutputFormat, Tool, ToolChoice
from sidecar.output.tool_formats import (
    FormatParser,
    ToolSyntax,
    hermes_json,
    qwen3_coder_xml,
)

_BETWEEN = r"[ ]?|\n[ ]{0,20}"
_ANSWER_JSON = {"whitespace_flexible": True, "whitespace_pattern": _BETWEEN}
# As `tojson` prints, so that a call is byte-equal to how a template prints it later.
_CALL_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
_ANY_OBJECT = {"type": "object"}
# Behind a close tag models write newlines before the answer; they are not shown.
_LEADING = 'leading: ("\\n" "\\n"?)?'
_NO_LEADING = 'leading: ""'
_CLASS_ESCAPES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \\t\\n\\r\\f\\v"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def answer_grammar(
    asked: OutputFormat,
    syntax: ToolSyntax | None,
    tokens: Mapping[str, int],
    *,
    is_behind_thinking: bool,
) -> str:
    """
    The grammar of a text.

    Args:
        syntax: how calls are written, if tools are offered: a call may come instead.
        tokens: the vocabulary.
    Raises:
        ValueError: a pattern that cannot be told to the library.
    """
    leading = _LEADING if is_behind_thinking else _NO_LEADING
    rules = [leading, f"answer: {_answer(asked)}"]
    if syntax is None:
        return _joined("start: leading answer", rules)
    opener = _marker(syntax.opener, tokens)
    return _joined("start: leading (answer | call)", [*rules, f"call: {opener} <[*]>*"])


def _answer(asked: OutputFormat) -> str:
    if asked.kind == "json_schema":
        options = {**_ANSWER_JSON, "lenient": not asked.is_strict}
        return _json_rule(asked.value, options)
    if asked.kind == "json_object":
        return _json_rule(_ANY_OBJECT, _ANSWER_JSON)
    if asked.kind == "choice":
        return " | ".join(_text(choice) for choice in asked.value)
    return f"/{_slashed(ascii_classes(asked.value))}/"


def call_grammar(
    choice: ToolChoice,
    tools: Sequence[Tool],
    syntax: ToolSyntax,
    tokens: Mapping[str, int],
) -> str | None:
    """
    The grammar of one or more calls, of the one that is named if one is.

    Returns:
        None: it cannot be told yet how this model writes them.
    """
    offered = [t for t in tools if choice.name in (None, t.name)]
    write = _WRITERS.get(syntax.formats[0]) if syntax.formats else None
    if write is None or not offered or not syntax.closer:
        return None
    bodies = [write(index, tool) for index, tool in enumerate(offered)]
    names = " | ".join(f"call{index}" for index in range(len(offered)))
    opener, closer = (_marker(m, tokens) for m in (syntax.opener, syntax.closer))
    more = "" if choice.mode == "named" else ' ("\\n" call)*'
    rules = [
        _LEADING,
        f'call: {opener} "\\n" ({names}) "\\n" {closer}',
        *(rule for body in bodies for rule in body),
    ]
    return _joined(f"start: leading call{more}", rules)


def _json_call(index: int, tool: Tool) -> list[str]:
    head = _text(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return [
        f'call{index}: {head} arguments{index} "}}"',
        f"arguments{index}: {_json_rule(_object_schema(tool), _CALL_JSON)}",
    ]


def _xml_call(index: int, tool: Tool) -> list[str]:
    schema = _object_schema(tool)
    properties = schema.get("properties")
    required = schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    needed = set(required) if isinstance(required, list) else set()
    rules, parts = [], []
    for number, name in enumerate(properties):
        rule = f"value{index}_{number}"
        head = _text(f"<parameter={name}>\n")
        parts.append(f"({head} {rule})" + ("" if name in needed else "?"))
        rules.append(_xml_value(rule, properties[name]))
    head = _text(f"<function={tool.name}>\n")
    return [f'call{index}: {head} {" ".join(parts)} "</function>"', *rules]


def _xml_value(rule: str, schema: Any) -> str:
    end = "\\n</parameter>\\n"
    if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
        return f'{rule}: {_json_rule(schema, _CALL_JSON)} "{end}"'
    return f'{rule}[suffix="{end}"]: /(?s:.*)/'


_WRITERS: dict[FormatParser, Callable[[int, Tool], list[str]]] = {
    hermes_json: _json_call,
    qwen3_coder_xml: _xml_call,
}


def _object_schema(tool: Tool) -> dict[str, Any]:
    schema = dict(tool.parameters)
    return schema if schema.get("type") == "object" else dict(_ANY_OBJECT)


def _json_rule(schema: Any, options: Mapping[str, Any]) -> str:
    whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return f"%json {json.dumps({**whole, 'x-guidance': options})}"


def _marker(text: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[text]}]>" if text in tokens else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _joined(start: str, rules: Sequence[str]) -> str:
    return "\n".join([start, *rules]) + "\n"


def ascii_classes(pattern: str) -> str:
    r"""
    A pattern whose `\d`, `\w` and `\s` mean ASCII, as JSON Schema's users expect.

    The library's are Unicode: an answer had Bengali digits.

    Raises:
        ValueError: a negated class within brackets.
    """
    found: list[str] = []
    at, is_inside = 0, False
    while at < len(pattern):
        escape = _ESCAPE.match(pattern, at)
        piece = escape.group() if escape else pattern[at]
        at += len(piece)
        if escape and escape[1].lower() in _CLASS_ESCAPES:
            piece = _class_of(escape[1], is_inside=is_inside)
        elif not escape and piece == "[":
            is_inside = True
        elif not escape and piece == "]":
            is_inside = False
        found.append(piece)
    return "".join(found)


def _class_of(letter: str, *, is_inside: bool) -> str:
    inside = _CLASS_ESCAPES[letter.lower()]
    if is_inside and letter.isupper():
        raise ValueError(f"\\{letter} within brackets is not supported")
    if is_inside:
        return inside
    return f"[^{inside}]" if letter.isupper() else f"[{inside}]"


def _slashed(pattern: str) -> str:
    """A pattern as Lark has it, between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
