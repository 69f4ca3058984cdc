"""
The grammar that an answer must keep to, as Lark text for llguidance.

White space is bounded: with JSON's own a model may write newlines for ever. What is one
token in the vocabulary (`<tool_call>`) must be named as that token: as a text the
grammar would let the token through and then fail on it.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.requests import OutputFormat, Tool, ToolChoice
from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.calls.element_calls import qwen3_coder_xml
from sidecar.output.calls.glm_calls import glm4_native
from sidecar.output.calls.json_calls import bare_json, hermes_json
from sidecar.output.calls.marked_calls import mistral

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
_MAX_PATTERNS_AT_ONCE = 4
# Behind a close tag models write newlines before the answer; they are not shown.
_LEADING = 'leading: ("\\n" "\\n"?)?'
_NO_LEADING = 'leading: ""'
_CLASS_ESCAPES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \\t\\n\\r\\f\\v"}
_ESCAPE_OR_END = re.compile(r"\\.|/|\n", re.DOTALL)
_IN_SLASHES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_START = re.compile(r"[ \t]*[?!]?start\b")


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


def _check_patterns(schema: Any) -> None:
    """
    Refuse what the library would intersect for minutes.

    Raises:
        ValueError: too many patterns hold at once.
    """
    level = [schema]
    while level:
        for item in level:
            both = item.get("allOf") if isinstance(item, dict) else None
            if isinstance(both, list):
                patterns = [one for one in both if "pattern" in str(one)]
                if len(patterns) > _MAX_PATTERNS_AT_ONCE:
                    most = _MAX_PATTERNS_AT_ONCE
                    raise ValueError(f"allOf with more than {most} patterns")
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]


def _answer(asked: OutputFormat) -> str:
    if asked.kind == "json_schema":
        _check_patterns(asked.value)
    if asked.kind == "json_schema":
        options = {**_ANSWER_JSON, "lenient": not asked.is_strict}
        return _json_rule(asked.value, options)
    if asked.kind == "json_object":
        return _json_rule(_ANY_OBJECT, _ANSWER_JSON)
    if asked.kind == "choice":
        return " | ".join(_text(choice) for choice in asked.value)
    if asked.kind == "grammar":
        return f"%lark {{\n{_lark(asked.value)}\n}}"
    return f"/{_slashed(ascii_classes(asked.value))}/"


def _lark(text: str) -> str:
    """
    A client's grammar, as llguidance takes it within another.

    Raises:
        ValueError: it has no rule `start`: GBNF is not taken, for the library's own
            converter makes other grammars of some.
    """
    if not any(_START.match(line) for line in text.split("\n")):
        raise ValueError("it must be in Lark, with a rule `start`")
    return text


def can_hold_calls(syntax: ToolSyntax) -> bool:
    """Whether there is a grammar of the calls of such a model."""
    return bool(syntax.formats) and syntax.formats[0] in _WRITERS


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
    Raises:
        ValueError: a schema that cannot be told to the library.
    """
    offered = [t for t in tools if choice.name in (None, t.name)]
    for tool in offered:
        _check_patterns(tool.parameters)
    writer = _WRITERS.get(syntax.formats[0]) if syntax.formats else None
    if writer is None or not offered:
        return None
    marker = functools.partial(_marker, tokens=tokens)
    calls = [writer.call(number, tool, marker) for number, tool in enumerate(offered)]
    names = " | ".join(f"call{number}" for number in range(len(offered)))
    opener = marker(syntax.opener) if writer.has_opener else '""'
    closer = marker(syntax.closer) if writer.has_closer else '""'
    space = f" {_text(writer.space)} " if writer.space else " "
    is_alone = choice.mode == "named" or choice.is_single or writer.is_alone
    more = "" if is_alone else f"({space} call)*"
    rules = [
        _LEADING,
        f"call: {opener}{space}({names}){space}{closer}",
        *(rule for call in calls for rule in call),
    ]
    return _joined(f"start: leading call {more}", rules)


_Marker = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Writer:
    """
    How one format's calls are told as rules.

    Args:
        call: the rules of one tool's call, the first of them `callN`.
        space: around its body, and between calls.
        has_opener, has_closer: whether the format's marks stand around it.
        is_alone: no other call follows.
    """

    call: Callable[[int, Tool, _Marker], list[str]]
    space: str = "\n"
    has_opener: bool = True
    has_closer: bool = True
    is_alone: bool = False


def _json_call(number: int, tool: Tool, marker: _Marker) -> list[str]:
    return _named_json(number, tool, "arguments")


def _bare_call(number: int, tool: Tool, marker: _Marker) -> list[str]:
    return _named_json(number, tool, "parameters")


def _named_json(number: int, tool: Tool, key: str) -> list[str]:
    head = _text(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
    return [
        f'call{number}: {head} arguments{number} "}}"',
        f"arguments{number}: {_json_rule(_object_schema(tool), _CALL_JSON)}",
    ]


def _mistral_call(number: int, tool: Tool, marker: _Marker) -> list[str]:
    return [
        f"call{number}: {_text(tool.name)} {marker('[ARGS]')} arguments{number}",
        f"arguments{number}: {_json_rule(_object_schema(tool), _CALL_JSON)}",
    ]


def _xml_call(number: int, tool: Tool, marker: _Marker) -> list[str]:
    parts, rules = [], []
    for name, schema, rule, suffix in _parameters(number, tool):
        head = _text(f"<parameter={name}>\n")
        parts.append(f"({head} {rule}){suffix}")
        rules += _value(rule, schema, '"\\n</parameter>\\n"', "\\n</parameter>\\n")
    head = _text(f"<function={tool.name}>\n")
    return [f'call{number}: {head} {" ".join(parts)} "</function>"', *rules]


def _glm_call(number: int, tool: Tool, marker: _Marker) -> list[str]:
    parts, rules = [], []
    end = marker("</arg_value>")
    for name, schema, rule, suffix in _parameters(number, tool):
        key = f"{marker('<arg_key>')} {_text(name)} {marker('</arg_key>')}"
        parts.append(f'("\\n" {key} "\\n" {marker("<arg_value>")} {rule}){suffix}')
        text_end = "" if end.startswith("<[") else "</arg_value>"
        rules += _value(rule, schema, end, text_end)
    return [f'call{number}: {_text(tool.name)} {" ".join(parts)} "\\n"', *rules]


def _parameters(number: int, tool: Tool) -> Iterator[tuple[str, Any, str, str]]:
    """Each parameter's name, schema, the name of its rule, and `?` if it may go."""
    schema = _object_schema(tool)
    properties, required = schema.get("properties"), schema.get("required")
    listed = required if isinstance(required, list) else []
    needed = {name for name in listed if isinstance(name, str)}
    for place, (name, inner) in enumerate(
        properties.items() if isinstance(properties, dict) else ()
    ):
        yield name, inner, f"value{number}_{place}", "" if name in needed else "?"


def _value(rule: str, schema: Any, end: str, text_end: str) -> list[str]:
    """
    The rule of a value up to its end; a string stands as it is.

    Args:
        end: as the grammar has it. text_end: as a suffix; "": it is one token.
    """
    choices = schema.get("enum") if isinstance(schema, dict) else None
    listed = choices if isinstance(choices, list) else []
    if listed and all(isinstance(choice, str) for choice in listed):
        return [f"{rule}: ({' | '.join(map(_text, listed))}) {end}"]
    if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
        return [f"{rule}: {_json_rule(schema, _CALL_JSON)} {end}"]
    if text_end:
        return [f'{rule}[suffix="{text_end}"]: /(?s:.*)/']
    return [f"{rule}: /(?s:.*)/ {end}"]


_WRITERS: dict[Format, _Writer] = {
    hermes_json: _Writer(_json_call),
    qwen3_coder_xml: _Writer(_xml_call),
    glm4_native: _Writer(_glm_call, space=""),
    mistral: _Writer(_mistral_call, space="", has_closer=False),
    bare_json: _Writer(
        _bare_call, space="", has_opener=False, has_closer=False, is_alone=True
    ),
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
    return _ESCAPE_OR_END.sub(
        lambda found: _IN_SLASHES.get(found[0], found[0]), pattern
    )
