"""Calls as elements, one for each argument, as rules."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from sidecar.core.requests import Tool
from sidecar.output.calls.element_calls import (
    DSML,
    DSML_SPACED,
    MINIMAX,
    MINIMAX_M3,
    QWEN,
    SEED,
)
from sidecar.output.calls.tool_schema import ToolSchema, given_values
from sidecar.output.grammars.lark import (
    ANY_NAME,
    Rules,
    Tokens,
    any_of,
    call_json,
    mark,
    spelled,
    text,
    up_to,
)

_A_NAME = "\0"  # stands where a name will


_CONSTANTS = {"boolean": (True, False), "null": (None,)}
Kind = Literal["", "t", "j"]  # all of its values, the texts alone, or all others


class Value:
    """
    The values of one argument, where a text stands without quotes.

    Args:
        owner: the tool's schema. schema: the argument's.
        is_python: constants are written as Python does, too.
    """

    def __init__(
        self, owner: ToolSchema, schema: Any, *, is_python: bool = False
    ) -> None:
        self._is_python = is_python
        self._texts: list[str] = []
        self._is_free = False
        self._json: list[str] = []
        self._spent = Rules()
        for one in owner.alternatives(schema):
            self._add(owner, one)

    @property
    def has_texts(self) -> bool:
        """Whether it may be a text."""
        return self._is_free or bool(self._texts)

    @property
    def has_json(self) -> bool:
        """Whether it may be anything else."""
        return bool(self._json)

    def rule(self, name: str, end: str, tokens: Tokens, kind: Kind) -> str:
        """The rule of a value of a kind and the end behind it."""
        if self._is_free and kind != "j":
            return up_to(name, end, tokens)  # whatever else it may be is one too
        choices = [*(self._texts if kind != "j" else ())]
        choices += self._json if kind != "t" else ()
        return f"{name}: {any_of(choices)} {mark(end, tokens)}"

    def _add(self, owner: ToolSchema, schema: dict[str, Any]) -> None:
        given = given_values(schema)
        for value in given or ():
            if isinstance(value, str):
                self._spend(self._texts, text(value))
            else:
                self._spend(self._json, text(json.dumps(value, ensure_ascii=False)))
                self._add_python(value)
        if given is not None:
            return
        kind = schema.get("type")
        self._is_free |= kind in ("string", None)
        if kind != "string":
            self._spend(self._json, call_json(owner.standalone(schema)))
        for constant in _CONSTANTS.get(str(kind), ()):
            self._add_python(constant)

    def _add_python(self, value: Any) -> None:
        if self._is_python and (value is None or isinstance(value, bool)):
            self._spend(self._json, text(str(value)))

    def _spend(self, where: list[str], written: str) -> None:
        self._spent.spend(len(written))
        where.append(written)


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
        is_python: constants are written as Python does, too.
        has_loose_lines: line breaks between the tags come or not.
        ends_name: characters that end an argument's name for its readers.
    """

    call: Callable[[str], str]
    call_end: str
    argument: Callable[[str, bool], str]
    argument_end: Callable[[str], str]
    says_kind: bool = False
    is_python: bool = False
    has_loose_lines: bool = False
    ends_name: str = '<>"'

    def __call__(self, number: int, tool: Tool, tokens: Tokens) -> list[str]:
        """
        The rules of one tool's call.

        Raises:
            ValueError: nothing of it can be told, or an argument's name not be read.
        """
        schema, parts = ToolSchema(tool.parameters), []
        if not all(map(self._is_readable, (one.name for one in schema.arguments))):
            raise ValueError("an argument's name cannot stand in its tag")
        rules = Rules()
        for place, one in enumerate(schema.arguments):
            rule = f"value{number}_{place}"
            value = Value(schema, one.schema, is_python=self.is_python)
            end = self.argument_end(one.name)
            shapes = []
            for is_text, kind in self._shapes(value):
                head = self._spelled(self.argument(one.name, is_text), tokens)
                shapes.append(f"{head} {rule}{kind}")
                rules.add(value.rule(f"{rule}{kind}", end, tokens, kind))
            parts.append(f"{any_of(shapes)}{'' if one.is_needed else '?'}")
        more = self.argument_end("")
        if schema.takes_any and more == self.argument_end("a"):
            rule = f"value{number}_any"
            parts.append(f"({self._any_head(tokens)} {rule})*")
            rules.add(up_to(rule, more, tokens))
        head = self._spelled(self.call(tool.name), tokens)
        tail = self._spelled(self.call_end, tokens)
        return [f"call{number}: {head} {' '.join(parts)} {tail}", *rules.texts]

    def _is_readable(self, name: str) -> bool:
        return bool(name) and not set(name) & set(self.ends_name)

    def _shapes(self, value: Value) -> list[tuple[bool, Kind]]:
        """How it may be written: as a text, or as JSON, where the format tells them."""
        if not self.says_kind:
            return [(True, "")]
        found: list[tuple[bool, Kind]] = [(True, "t")] if value.has_texts else []
        return [*found, (False, "j")] if value.has_json else found

    def _any_head(self, tokens: Tokens) -> str:
        """What begins an argument of any name, which is a text."""
        before, _, behind = self.argument(_A_NAME, True).partition(_A_NAME)
        behind = self._spelled(behind, tokens)
        return f"{self._spelled(before, tokens)} {ANY_NAME} {behind}"

    def _spelled(self, written: str, tokens: Tokens) -> str:
        if not self.has_loose_lines:
            return spelled(written, tokens)
        lines = [spelled(line, tokens) for line in written.split("\n")]
        return f" {text(chr(10))}? ".join(lines)


qwen_rules = ElementRules(
    lambda name: f"<function={name}>\n",
    "</function>",
    lambda name, is_text: f"<parameter={name}>\n",
    QWEN.written_end,
    is_python=QWEN.is_python,
    ends_name=">",
)
seed_rules = replace(
    qwen_rules,
    argument=lambda name, is_text: f"<parameter={name}>",
    argument_end=SEED.written_end,
)
minimax_rules = ElementRules(
    lambda name: f'<invoke name="{name}">\n',
    "</invoke>",
    lambda name, is_text: f'<parameter name="{name}">',
    MINIMAX.written_end,
)
_M3 = "]<]minimax[>["
minimax_m3_rules = ElementRules(
    lambda name: f'{_M3}<invoke name="{name}">\n',
    f"{_M3}</invoke>",
    lambda name, is_text: f"{_M3}<{name}>",
    MINIMAX_M3.written_end,
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
        (DSML_SPACED if space else DSML).written_end,
        says_kind=True,
    )


def glm_rules(prefix: str = "") -> ElementRules:
    """
    A name, and each argument as a key and a value between tags.

    Args:
        prefix: of the tags' names.
    """

    def argument(name: str, is_text: bool) -> str:
        key = f"<{prefix}arg_key>{name}</{prefix}arg_key>"
        return f"\n{key}\n<{prefix}arg_value>"

    return ElementRules(
        lambda name: name,
        "\n",
        argument,
        lambda name: f"</{prefix}arg_value>",
        has_loose_lines=True,
        ends_name="",  # such names are written with JSON's escapes
    )
