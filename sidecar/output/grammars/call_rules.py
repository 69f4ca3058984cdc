"""How calls of one format are told as rules; those with JSON arguments are here."""

from collections.abc import Callable
from dataclasses import dataclass

from sidecar.core.requests import Tool
from sidecar.output.calls.tool_schema import ToolSchema
from sidecar.output.grammars.lark import (
    Tokens,
    call_json,
    mark,
    text,
)


@dataclass(frozen=True, slots=True)
class CallRules:
    """
    How one format's calls are told as rules.

    Args:
        call: the rules of one tool's call, the first of them `callN`.
        head, between, tail: what stands behind the opener, between two calls, and
            before the closer.
        is_block: whether all calls stand between one pair of marks; else each has its
            own.
        has_marks: whether the format's opener and closer are written around them.
        is_alone: no other call follows.
    """

    call: Callable[[int, Tool, Tokens], list[str]]
    head: str = ""
    between: str = ""
    tail: str = ""
    is_block: bool = False
    has_marks: bool = True
    is_alone: bool = False


def json_arguments(number: int, tool: Tool) -> str:
    """The rule `argumentsN`."""
    return f"arguments{number}: {call_json(ToolSchema(tool.parameters).whole)}"


def object_call(
    name_key: str, arguments_key: str, first: str = "", last: str = '"}"'
) -> Callable[[int, Tool, Tokens], list[str]]:
    """
    A call as an object of a name and arguments.

    Args:
        first: an expression of the members before them. last: of what closes it.
    """

    def call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
        opening = "" if first else "{"
        key = f'{opening}"{name_key}": {text(tool.name)}, "{arguments_key}": '
        return [
            f"call{number}: {first} {text(key)} arguments{number} {last}",
            json_arguments(number, tool),
        ]

    return call


def mistral_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """`NAME[ARGS]{..}`."""
    return [
        f"call{number}: {text(tool.name)} {mark('[ARGS]', tokens)} arguments{number}",
        json_arguments(number, tool),
    ]


def named_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """`<name>NAME</name><arguments>{..}</arguments>`."""
    head = text(f"<name>{tool.name}</name>\n<arguments>")
    return [
        f'call{number}: {head} arguments{number} "</arguments>"',
        json_arguments(number, tool),
    ]


def kimi_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """`functions.NAME:N`, and JSON between two marks."""
    begin = mark("<|tool_call_begin|>", tokens)
    name = f"{text(f'functions.{tool.name}:')} /(0|[1-9][0-9]{{0,2}})/"
    argument_begin = mark("<|tool_call_argument_begin|>", tokens)
    end = mark("<|tool_call_end|>", tokens)
    return [
        f"call{number}: {begin} {name} {argument_begin} arguments{number} {end}",
        json_arguments(number, tool),
    ]


def deepseek_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """`NAME`, a mark and JSON between two marks, as V3.1 writes it."""
    begin, end = _deepseek_marks(tokens)
    separator = mark("<｜tool▁sep｜>", tokens)
    return [
        f"call{number}: {begin} {text(tool.name)} {separator} arguments{number} {end}",
        json_arguments(number, tool),
    ]


def deepseek_fenced_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """`function`, a mark, `NAME` and JSON in a fence, as V3 and R1 write it."""
    begin, end = _deepseek_marks(tokens)
    separator = mark("<｜tool▁sep｜>", tokens)
    name = text(f"{tool.name}\n```json\n")
    return [
        f'call{number}: {begin} "function" {separator} {name}'
        f' arguments{number} "\\n```" {end}',
        json_arguments(number, tool),
    ]


def _deepseek_marks(tokens: Tokens) -> tuple[str, str]:
    return mark("<｜tool▁call▁begin｜>", tokens), mark("<｜tool▁call▁end｜>", tokens)
