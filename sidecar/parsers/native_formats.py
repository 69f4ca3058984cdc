"""
Call formats of single model families that the library has no parser for.

As in `tool_formats`: a parser takes the inside of one block and raises ValueError where
that is not its format.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from sidecar.core.requests import Tool
from sidecar.parsers.tool_calls import ToolSyntax
from sidecar.parsers.tool_formats import (
    ParsedCall,
    hermes_json,
    qwen3_coder_xml,
    require_nothing_left,
)

_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"\s*([^\n]+?)\s*```(?:json)?\n(.*?)\n?```\s*", re.DOTALL)
_INVOKE = re.compile(
    r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL
)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)'
    r"</｜DSML｜parameter>",
    re.DOTALL,
)
_HEADER = re.compile(r"\s*([\w.:-]+)(?:\[CALL_ID\]\w+)?\s*\[ARGS\]\s*")
_RECIPIENT = re.compile(r"(?:functions\.)?([\w.:-]+)")
_BARE = '{"name":'
_DECODER = json.JSONDecoder(strict=False)


def deepseek(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`NAME<｜tool▁sep｜>{..}`, or a fence behind the name, each call between marks."""
    calls = []
    for inside in _CALL.findall(body):
        name, found, arguments = inside.partition("<｜tool▁sep｜>")
        if not found:
            raise ValueError("no separator between name and arguments")
        fenced = _FENCED.fullmatch(arguments)
        if fenced:
            name, arguments = fenced.groups()
        calls += _call(name.strip(), arguments)
    require_nothing_left(_CALL.sub("", body))
    return _not_empty(calls)


def deepseek_dsml(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`invoke` elements of `parameter` elements that say whether they are strings."""
    calls = []
    for name, inside in _INVOKE.findall(body):
        arguments = {
            key: value if is_string == "true" else json.loads(value)
            for key, is_string, value in _PARAMETER.findall(inside)
        }
        require_nothing_left(_PARAMETER.sub("", inside))
        calls.append(ParsedCall(name, arguments))
    require_nothing_left(_INVOKE.sub("", body))
    return _not_empty(calls)


def mistral(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`NAME[ARGS]{..}`, maybe `[CALL_ID]ID` between; older ones: a list of objects."""
    calls, at = [], 0
    while head := _HEADER.match(body, at):
        value, at = _DECODER.raw_decode(body, head.end())
        if not isinstance(value, dict):
            raise ValueError("arguments must be an object")
        calls.append(ParsedCall(head.group(1), value))
    if not calls:
        return hermes_json(body, tools)
    require_nothing_left(body[at:])
    return calls


def channels(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`functions.NAME`, maybe more of a header, `<|message|>` and an object."""
    header, found, arguments = body.partition("<|message|>")
    name = _RECIPIENT.match(header)
    if not found or name is None:
        raise ValueError("no recipient")
    return _call(name.group(1), arguments)


def bare_json(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """
    `{"name": .., "parameters": {..}}` without any marker, several after semicolons.

    Only of offered tools: an answer may hold JSON of its own.
    """
    text, calls = (_BARE + body).strip(), []
    while text:
        _, end = _DECODER.raw_decode(text)
        calls += hermes_json(text[:end], tools)
        text = text[end:].lstrip().removeprefix(";").lstrip()
    if any(call.name not in {tool.name for tool in tools} for call in calls):
        raise ValueError("not an offered tool")
    return calls


# By what a template or a vocabulary holds; the first that is there counts.
_SYNTAXES: tuple[tuple[str, ToolSyntax], ...] = (
    (
        "｜DSML｜",
        ToolSyntax(
            "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", (deepseek_dsml,)
        ),
    ),
    (
        "<｜tool▁calls▁begin｜>",
        ToolSyntax("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", (deepseek,)),
    ),
    (
        "<seed:tool_call>",
        ToolSyntax("<seed:tool_call>", "</seed:tool_call>", (qwen3_coder_xml,)),
    ),
    ("[TOOL_CALLS]", ToolSyntax("[TOOL_CALLS]", "", (mistral,))),
    ("<TOOLCALL>", ToolSyntax("<TOOLCALL>", "</TOOLCALL>", (hermes_json,))),
    ("<|start_header_id|>ipython", ToolSyntax(_BARE, "<|eot_id|>", (bare_json,))),
)
_CHANNELS = ("<|channel|>", "<|message|>")
_CHANNEL_SYNTAX = ToolSyntax("to=", "<|call|>", (channels,))
_THINK_TAGS = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def has_channels(vocab: Collection[str]) -> bool:
    """Whether this model writes messages on channels, as gpt-oss does."""
    return all(token in vocab for token in _CHANNELS)


def native_syntax(template: str, vocab: Collection[str]) -> ToolSyntax | None:
    """How this model writes calls, if it is one of these families."""
    if has_channels(vocab):
        return _CHANNEL_SYNTAX
    for marker, syntax in _SYNTAXES:
        if marker in template or marker in vocab:
            return syntax
    return None


def native_think_tags(vocab: Collection[str]) -> tuple[str, str] | None:
    """The tags of its thinking, if its vocabulary has them."""
    found = (tags for tags in _THINK_TAGS if all(tag in vocab for tag in tags))
    return next(found, None)


def _call(name: str, arguments: str) -> list[ParsedCall]:
    value: Any = json.loads(arguments, strict=False) if arguments.strip() else {}
    if not name or not isinstance(value, dict):
        raise ValueError("a call needs a name and an object")
    return [ParsedCall(name, value)]


def _not_empty(calls: list[ParsedCall]) -> list[ParsedCall]:
    if not calls:
        raise ValueError("no call element")
    return calls
