"""Calls with literals of a language of their own, as rules: Gemma's and Python's."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.requests import Tool
from sidecar.output.grammars.lark import (
    ANY_NAME,
    Tokens,
    any_of,
    call_json,
    mark,
    object_schema,
    properties_of,
    takes_any,
    text,
    up_to,
)

_MAX_LEVELS = 8  # of a schema; deeper values may be anything
_MAX_COUNTED = 64  # items of a list; more are not counted
_PLAIN_KEY = re.compile(r"[\w.-]+")
_NUMBERS = ("integer", "number")


@dataclass(frozen=True, slots=True)
class Literals:
    """
    How a language writes values.

    Args:
        any_text, any_key: rules of a text, and of a member's key with what follows it.
        quoted: a given text. key: a given key. comma: between values.
        constants: JSON's by their JSON text.
    """

    any_text: list[str]
    any_key: list[str]
    quoted: Callable[[str], str]
    key: Callable[[str], str]
    comma: str
    constants: dict[str, str]

    def shared(self) -> list[str]:
        """The rules `any_text`, `any_key` and `any_value`."""
        constants = " | ".join(text(one) for one in self.constants.values())
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


@dataclass(slots=True)
class _Values:
    """Makes the rules of a call's values; their names begin with `prefix`."""

    literals: Literals
    prefix: str
    rules: list[str] = field(default_factory=list)

    def named(self, expression: str) -> str:
        """A rule of its own, by its name."""
        name = f"{self.prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def value(self, schema: Any, level: int = 0) -> str:
        """An expression of the values of a schema: its types, names and choices."""
        if not isinstance(schema, dict) or level > _MAX_LEVELS:
            return "any_value"
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return any_of([self.value(one, level + 1) for one in schema[key]])
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and listed:
            scalars = [one for one in listed if not isinstance(one, dict | list)]
            is_whole = len(scalars) == len(listed)
            return any_of([*map(self._scalar, scalars)]) if is_whole else "any_value"
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            each = [{**schema, "type": one} for one in kind]
            return any_of([self.value(one, level + 1) for one in each])
        return self._typed(schema, level)

    def _typed(self, schema: dict[str, Any], level: int) -> str:
        kind, constants = schema.get("type"), self.literals.constants
        if kind in _NUMBERS:
            return self.named(call_json(schema))
        if kind == "array":
            return self._list(schema, level)
        if kind == "object":
            return self._object(schema, level)
        booleans = any_of([text(constants["true"]), text(constants["false"])])
        simple = {"string": "any_text", "boolean": booleans}
        simple["null"] = text(constants["null"])
        return simple.get(str(kind), "any_value")

    def _list(self, schema: dict[str, Any], level: int) -> str:
        item, comma = self.value(schema.get("items"), level + 1), self.literals.comma
        least, most = _count(schema, "minItems"), _count(schema, "maxItems")
        if most == 0:
            return text("[]")
        last = "" if most is None else most - 1
        others = f"({text(comma)} {item}){{{max((least or 0) - 1, 0)},{last}}}"
        return f'("[" ({item} {others}){"" if least else "?"} "]")'

    def _object(self, schema: dict[str, Any], level: int) -> str:
        members = [*properties_of(schema)]
        if not members:
            return "any_object"
        return f'("{{" {self.members(members, self.literals.key, level + 1)} "}}")'

    def arguments(
        self, schema: dict[str, Any], key: Callable[[str], str], other: str
    ) -> str:
        """
        An expression of a call's arguments.

        Args:
            key: what begins one of a name. other: an expression of one of any name.
        """
        members, comma = [*properties_of(schema)], text(self.literals.comma)
        if not members and takes_any(schema):
            return f"({other} ({comma} {other})*)?"
        return self.members(members, key)

    def members(
        self,
        members: Sequence[tuple[str, Any, bool]],
        key: Callable[[str], str],
        level: int = 0,
    ) -> str:
        """
        An expression of members in their order, with commas between.

        From behind: what may stand from a member on, as the first one, and with one
        before it.
        """
        first = behind = '""'
        comma = text(self.literals.comma)
        for name, schema, is_needed in reversed(members):
            member = f"{key(name)} {self.value(schema, level)}"
            others = behind
            skipped = "" if is_needed else f" | {behind}"
            behind = self.named(f"{comma} {member} {others}{skipped}")
            skipped = "" if is_needed else f" | {first}"
            first = self.named(f"{member} {others}{skipped}")
        return first

    def _scalar(self, value: Any) -> str:
        if isinstance(value, str):
            return self.literals.quoted(value)
        printed = json.dumps(value)
        return text(self.literals.constants.get(printed, printed))


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
        if _PLAIN_KEY.fullmatch(name):
            return text(f"{name}:")
        return f'{quoted(name)} ":"'

    literals = Literals(
        [f"any_text: {begin} text_inside", up_to("text_inside", quote, tokens)],
        [r"any_key: /[A-Za-z_][A-Za-z0-9_]*:/"],
        quoted,
        key,
        ",",
        {"true": "true", "false": "false", "null": "null"},
    )
    values = _Values(literals, f"value{number}")
    inside = values.arguments(object_schema(tool), key, "any_member")
    return [
        f'call{number}: {text(f"call:{tool.name}{{")} {inside} "}}"',
        *values.rules,
        *literals.shared(),
    ]


_PYTHON = Literals(
    [
        r"""any_text: /"([^"\\\x00-\x1f]|\\["'\\nrt])*"/"""
        r""" | /'([^'\\\x00-\x1f]|\\["'\\nrt])*'/"""
    ],
    ['any_key: any_text ": "'],
    lambda value: text(json.dumps(value, ensure_ascii=False)),
    lambda name: text(f"{json.dumps(name, ensure_ascii=False)}: "),
    ", ",
    {"true": "True", "false": "False", "null": "None"},
)


def python_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """`NAME(KEY=VALUE, ..)`, whatever the names are."""
    values = _Values(_PYTHON, f"value{number}")
    any_argument = f'{ANY_NAME} "=" any_value'
    inside = values.arguments(
        object_schema(tool), lambda name: text(f"{name}="), any_argument
    )
    return [
        f'call{number}: {text(f"{tool.name}(")} {inside} ")"',
        *values.rules,
        *_PYTHON.shared(),
    ]
