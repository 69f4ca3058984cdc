"""Calls with literals of a language of their own, as rules: Gemma's and Python's."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.requests import Tool
from sidecar.output.calls.gemma_calls import PLAIN_KEY
from sidecar.output.calls.python_names import can_be_spelled, is_one_word
from sidecar.output.calls.tool_schema import (
    Argument,
    ToolSchema,
    given_values,
    members_of,
)
from sidecar.output.grammars.lark import (
    ANY_NAME,
    Rules,
    Tokens,
    any_of,
    call_json,
    mark,
    text,
    up_to,
)

_MAX_COUNTED = 64  # items of a list; more are not counted
# Of values within values. One that refers to itself by a part of it is new each time.
_MAX_DEPTH = 24
_NUMBERS = ("integer", "number")
Written = Callable[[str, str], str]  # an argument, by its name and an expression


@dataclass(frozen=True, slots=True)
class Literals:
    """
    How a language writes values.

    Args:
        any_text, any_key: rules of a text, and of a member's key with what follows it.
        quoted: a given text. key: a given key. comma: between values.
        constants: how JSON's are written, by their JSON text.
    """

    any_text: list[str]
    any_key: list[str]
    quoted: Callable[[str], str]
    key: Callable[[str], str]
    comma: str
    constants: dict[str, tuple[str, ...]]

    def constant(self, printed: str) -> str:
        """A constant or a number, by its JSON text."""
        return any_of([text(one) for one in self.constants.get(printed, (printed,))])

    def shared(self) -> list[str]:
        """The rules `any_text`, `any_key` and `any_value`."""
        constants = " | ".join(self.constant(one) for one in self.constants)
        comma = text(self.comma)
        return [
            *self.any_text,
            *self.any_key,
            f"any_number: {call_json({'type': 'number'})}",
            f'any_list: "[" (any_value ({comma} any_value)*)? "]"',
            "any_member: any_key any_value",
            f'any_object: "{{" (any_member ({comma} any_member)*)? "}}"',
            f"any_value: any_text | any_number | any_list | any_object | {constants}",
        ]


class _Values:
    """
    Makes the rules of a call's values, one for each schema within a tool's.

    Args:
        prefix: what their names begin with.
    """

    def __init__(self, literals: Literals, schema: ToolSchema, prefix: str) -> None:
        self._literals, self._schema, self._prefix = literals, schema, prefix
        self._rules, self._num_names = Rules(), 0
        self._known: dict[int, str] = {}
        self._seen: list[Any] = []  # they live as long as their ids are keys
        self._depth = 0

    @property
    def rules(self) -> list[str]:
        """Those that were made."""
        return self._rules.texts

    def arguments(self, other: str, write: Written | None = None) -> str:
        """
        An expression of a call's arguments.

        Args:
            other: an expression of one of any name.
            write: one of a name and a value; None: as a member of an object.
        """
        members, comma = self._schema.arguments, text(self._literals.comma)
        if not members and self._schema.takes_any:
            return f"({other} ({comma} {other})*)?"
        return self._members(members, write or self._member)

    def _name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}_{self._num_names}"

    def _named(self, expression: str) -> str:
        """A rule of its own, by its name."""
        name = self._name()
        self._rules.add(f"{name}: {expression}")
        return name

    def _value(self, schema: Any) -> str:
        """The rule of the values of a schema: its types, names and choices."""
        is_deep = self._depth >= _MAX_DEPTH
        if not isinstance(schema, dict) or (is_deep and id(schema) not in self._known):
            return "any_value"
        if id(schema) not in self._known:
            name = self._known[id(schema)] = self._name()  # it may refer to itself
            self._seen.append(schema)
            self._depth += 1
            self._rules.add(f"{name}: {self._alternatives(schema)}")
            self._depth -= 1
        return self._known[id(schema)]

    def _alternatives(self, schema: dict[str, Any]) -> str:
        each: dict[str, None] = {}
        for one in self._schema.alternatives(schema):
            expression = self._alternative(one)
            if expression not in each:
                self._rules.spend(len(expression))
            each[expression] = None
        return any_of([*each])

    def _alternative(self, schema: dict[str, Any]) -> str:
        given = given_values(schema)
        if given is not None:
            return any_of([self._given(value) for value in given])
        kind, literals = schema.get("type"), self._literals
        if kind in _NUMBERS:
            return self._named(call_json(schema))
        if kind == "array":
            return self._list(schema)
        if kind == "object":
            return self._object(schema)
        booleans = any_of([literals.constant("true"), literals.constant("false")])
        simple = {"string": "any_text", "boolean": booleans}
        simple["null"] = literals.constant("null")
        return simple.get(str(kind), "any_value")

    def _list(self, schema: dict[str, Any]) -> str:
        comma, first = text(self._literals.comma), schema.get("prefixItems")
        if isinstance(first, list) and first:
            return f'("[" {f" {comma} ".join(map(self._value, first))} "]")'
        item = self._value(schema.get("items"))
        least, most = _count(schema, "minItems"), _count(schema, "maxItems")
        if most == 0:
            return text("[]")
        last = "" if most is None else most - 1
        others = f"({comma} {item}){{{max((least or 0) - 1, 0)},{last}}}"
        return f'("[" ({item} {others}){"" if least else "?"} "]")'

    def _object(self, schema: dict[str, Any]) -> str:
        members, more = members_of(schema), schema.get("additionalProperties")
        if members:
            return f'("{{" {self._members(members, self._member)} "}}")'
        if more is False:
            return text("{}")
        if not isinstance(more, dict):
            return "any_object"
        one, comma = f"any_key {self._value(more)}", text(self._literals.comma)
        return f'("{{" ({one} ({comma} {one})*)? "}}")'

    def _member(self, name: str, value: str) -> str:
        return f"{self._literals.key(name)} {value}"

    def _members(self, members: Sequence[Argument], write: Written) -> str:
        """
        An expression of members in their order, with commas between.

        From behind: what may stand from a member on, as the first one, and with one
        before it.
        """
        first = behind = '""'
        comma = text(self._literals.comma)
        for one in reversed(members):
            member, others = write(one.name, self._value(one.schema)), behind
            skipped = "" if one.is_needed else f" | {behind}"
            behind = self._named(f"{comma} {member} {others}{skipped}")
            skipped = "" if one.is_needed else f" | {first}"
            first = self._named(f"{member} {others}{skipped}")
        return first

    def _given(self, value: Any) -> str:
        """A value that its schema lists."""
        literals = self._literals
        comma = f" {text(literals.comma)} "
        if isinstance(value, str):
            return literals.quoted(value)
        if isinstance(value, list):
            return f'("[" {comma.join(map(self._given, value))} "]")'
        if isinstance(value, dict):
            each = [f"{literals.key(k)} {self._given(v)}" for k, v in value.items()]
            return f'("{{" {comma.join(each)} "}}")'
        return literals.constant(json.dumps(value))


def _count(schema: dict[str, Any], key: str) -> int | None:
    """How many items a list must or may have; None: nothing is said of it."""
    count = schema.get(key)
    return count if type(count) is int and 0 <= count <= _MAX_COUNTED else None


def gemma_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """`call:NAME{KEY:VALUE,..}` with marks for quotes."""
    quote = '<|"|>' if '<|"|>' in tokens else "<escape>"
    begin = mark(quote, tokens)

    def quoted(value: str) -> str:
        return f"{begin} {text(value)} {begin}" if value else f"{begin} {begin}"

    def key(name: str) -> str:
        if PLAIN_KEY.fullmatch(name):
            return text(f"{name}:")
        return f'{quoted(name)} ":"'

    literals = Literals(
        [f"any_text: {begin} text_inside", up_to("text_inside", quote, tokens)],
        [rf'any_key: /{PLAIN_KEY.pattern}:/ | any_text ":"'],
        quoted,
        key,
        ",",
        {"true": ("true",), "false": ("false",), "null": ("null", "None")},
    )
    values = _Values(literals, ToolSchema(tool.parameters), f"value{number}")
    inside = values.arguments("any_member")
    return [
        f'call{number}: {text(f"call:{tool.name}{{")} {inside} "}}"',
        *values.rules,
        *literals.shared(),
    ]


_PYTHON_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r"}


def _python_text(value: str) -> str:
    """A given text in either quotes: templates print single ones, and JSON within."""
    single = "".join(_PYTHON_ESCAPES.get(char, char) for char in value)
    return any_of([text(json.dumps(value, ensure_ascii=False)), text(f"'{single}'")])


# As Python prints a text, and JSON within; of escapes those that both know, and \\x.
_ESCAPED = r"""\\(["'\\nrtbf]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4})"""
_PYTHON = Literals(
    [
        rf"""any_text: /"([^"\\\x00-\x1f]|{_ESCAPED})*"/"""
        rf""" | /'([^'\\\x00-\x1f]|{_ESCAPED})*'/"""
    ],
    ['any_key: any_text ": "'],
    _python_text,
    lambda name: f'{_python_text(name)} ": "',
    ", ",
    {"true": ("True", "true"), "false": ("False", "false"), "null": ("None", "null")},
)


def _python_argument(name: str, value: str) -> str:
    plain = f"{text(f'{name}=')} {value}"
    if is_one_word(name):
        return plain
    spelled_out = f'"**{{" {_python_text(name)} ": " {value} "}}"'
    return any_of([plain, spelled_out] if can_be_spelled(name) else [spelled_out])


def python_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """
    `NAME(KEY=VALUE, ..)`; a name that no reader would know there stands in a dict.

    Raises:
        ValueError: the tool's own name is such a one.
    """
    if not can_be_spelled(tool.name):
        raise ValueError("a tool's name cannot be read in Python's calls")
    values = _Values(_PYTHON, ToolSchema(tool.parameters), f"value{number}")
    any_argument = f'{ANY_NAME} "=" any_value'
    inside = values.arguments(any_argument, _python_argument)
    return [
        f'call{number}: {text(f"{tool.name}(")} {inside} ")"',
        *values.rules,
        *_PYTHON.shared(),
    ]
