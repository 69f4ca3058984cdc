"""Calls as elements, one for each argument, as rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sidecar.core.requests import Tool
from sidecar.output.calls.declared_types import TEXT_ALONE, Types, declared_types
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
    text_choices,
    up_to,
)

_A_NAME = "\0"  # stands where a name will


@dataclass(frozen=True, slots=True)
class _Argument:
    """
    One argument of a tool.

    Args:
        schema: with the definitions that it may refer to.
    """

    name: str
    schema: Any
    is_needed: bool
    types: Types

    def is_text(self, *, says_kind: bool) -> bool:
        """Whether it stands there as a text without quotes."""
        return self.types == TEXT_ALONE if says_kind else "string" in self.types


def _arguments(tool: Tool) -> list[_Argument]:
    root = object_schema(tool)
    types = declared_types(root)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return [
        _Argument(
            name,
            {**schema, **shared} if isinstance(schema, dict) else schema,
            is_needed,
            types[name],
        )
        for name, schema, is_needed in properties_of(root)
    ]


@dataclass(frozen=True, slots=True)
class ElementRules:
    """
    How one format writes its elements.

    Args:
        call, call_end: what begins a call of a name, and what ends it.
        argument: what begins an argument, by its name and whether a text follows that
            stands as it is. argument_end: what ends it, by its name.
        says_kind: whether an argument says that it is a text. Then one that may be
            more than that is JSON; else it is a text, and read as what it looks like.
    """

    call: Callable[[str], str]
    call_end: str
    argument: Callable[[str, bool], str]
    argument_end: Callable[[str], str]
    says_kind: bool = False

    def __call__(self, number: int, tool: Tool, tokens: Tokens) -> list[str]:
        """The rules of one tool's call."""
        parts, rules = [], []
        for place, one in enumerate(_arguments(tool)):
            name, schema, is_needed = one.name, one.schema, one.is_needed
            rule = f"value{number}_{place}"
            is_text = one.is_text(says_kind=self.says_kind)
            head = mark(self.argument(name, is_text), tokens)
            parts.append(f"({head} {rule}){'' if is_needed else '?'}")
            end = self.argument_end(name)
            rules.append(_value(rule, schema, end, tokens, is_text=is_text))
        more = self.argument_end("")
        if takes_any(object_schema(tool)) and more == self.argument_end("a"):
            rule = f"value{number}_any"
            parts.append(f"({self._any_head(tokens)} {rule})*")
            rules.append(up_to(rule, more, tokens))
        head = mark(self.call(tool.name), tokens)
        tail = mark(self.call_end, tokens)
        return [f"call{number}: {head} {' '.join(parts)} {tail}", *rules]

    def _any_head(self, tokens: Tokens) -> str:
        """What begins an argument of any name, which is a text."""
        before, _, behind = self.argument(_A_NAME, True).partition(_A_NAME)
        return f"{mark(before, tokens)} {ANY_NAME} {mark(behind, tokens)}"


def _value(rule: str, schema: Any, end: str, tokens: Tokens, *, is_text: bool) -> str:
    """The rule of a value and the end behind it; a text stands as it is."""
    choices = text_choices(schema)
    closing = mark(end, tokens)
    if choices:
        return f"{rule}: {any_of([text(choice) for choice in choices])} {closing}"
    if not is_text:
        return f"{rule}: {call_json(schema)} {closing}"
    return up_to(rule, end, tokens)


qwen_rules = ElementRules(
    lambda name: f"<function={name}>\n",
    "</function>",
    lambda name, is_text: f"<parameter={name}>\n",
    lambda name: "\n</parameter>\n",
)
minimax_rules = ElementRules(
    lambda name: f'<invoke name="{name}">\n',
    "</invoke>",
    lambda name, is_text: f'<parameter name="{name}">',
    lambda name: "</parameter>\n",
)
_M3 = "]<]minimax[>["
minimax_m3_rules = ElementRules(
    lambda name: f'{_M3}<invoke name="{name}">\n',
    f"{_M3}</invoke>",
    lambda name, is_text: f"{_M3}<{name}>",
    lambda name: f"{_M3}</{name}>\n",
)
_DSML = "｜DSML｜"


def dsml_rules(space: str) -> ElementRules:
    """DeepSeek's, with a space before each element's name or without."""

    def argument(name: str, is_text: bool) -> str:
        kind = "true" if is_text else "false"
        return f'<{_DSML}{space}parameter name="{name}" string="{kind}">'

    return ElementRules(
        lambda name: f'<{_DSML}{space}invoke name="{name}">\n',
        f"</{_DSML}{space}invoke>",
        argument,
        lambda name: f"</{_DSML}{space}parameter>\n",
        says_kind=True,
    )


def glm_rules(prefix: str = "") -> Callable[[int, Tool, Tokens], list[str]]:
    """
    A name, and each argument as a key and a value between tags.

    Args:
        prefix: of the tags' names.
    """
    key_tag, key_end = f"<{prefix}arg_key>", f"</{prefix}arg_key>"
    value_tag, value_end = f"<{prefix}arg_value>", f"</{prefix}arg_value>"

    def call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
        parts, rules = [], []
        for place, one in enumerate(_arguments(tool)):
            name, schema, is_needed = one.name, one.schema, one.is_needed
            rule = f"value{number}_{place}"
            key = f"{mark(key_tag, tokens)} {text(name)} {mark(key_end, tokens)}"
            head = f'"\\n" {key} "\\n" {mark(value_tag, tokens)}'
            parts.append(f"({head} {rule}){'' if is_needed else '?'}")
            is_text = one.is_text(says_kind=False)
            rules.append(_value(rule, schema, value_end, tokens, is_text=is_text))
        if takes_any(object_schema(tool)):
            rule = f"value{number}_any"
            key = f"{mark(key_tag, tokens)} {ANY_NAME} {mark(key_end, tokens)}"
            parts.append(f'("\\n" {key} "\\n" {mark(value_tag, tokens)} {rule})*')
            rules.append(up_to(rule, value_end, tokens))
        return [f'call{number}: {text(tool.name)} {" ".join(parts)} "\\n"', *rules]

    return call
