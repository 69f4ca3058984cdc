"""
More tool formats: those of single families that mlx-lm has no parser for.

As in `tool_formats`: a parser takes the inside of one block and raises ValueError where
that is not its format.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from sidecar.core.requests import Tool
from sidecar.output.tool_formats import (
    ParsedCall,
    ToolSyntax,
    cut_elements,
    end_of_space,
    hermes_json,
    qwen3_coder_xml,
    require_nothing_left,
    texts,
)

_CALL = re.compile("<｜tool▁call▁begin｜>")
_END_OF_CALL = re.compile("<｜tool▁call▁end｜>")
_INVOKE = re.compile('<｜DSML｜invoke name="([^"]+)">')
_END_OF_INVOKE = re.compile("</｜DSML｜invoke>")
_PARAMETER = re.compile('<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>')
_END_OF_PARAMETER = re.compile("</｜DSML｜parameter>")
_HEADER = re.compile(r"\s*([\w.:-]+)(?:\[CALL_ID\]\w+)?\s*\[ARGS\]\s*")
_RECIPIENT = re.compile(r"(?:functions\.)?([\w.:-]+)")
_BARE = '{"name":'
_DECODER = json.JSONDecoder(strict=False)


def deepseek(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`NAME<｜tool▁sep｜>{..}`, or a fence behind the name, each call between marks."""
    calls = []
    elements, rest = cut_elements(body, _CALL, _END_OF_CALL)
    for _, inside in elements:
        name, found, arguments = inside.partition("<｜tool▁sep｜>")
        if not found:
            raise ValueError("no separator between name and arguments")
        name, arguments = _unfenced(arguments) or (name, arguments)
        calls += _call(name.strip(), arguments)
    require_nothing_left(rest)
    return _not_empty(calls)


def deepseek_dsml(body: str, tools: Sequence[Tool]) -> list[ParsedCall]:
    """`invoke` elements of `parameter` elements that say whether they are strings."""
    calls = []
    invoked, rest = cut_elements(body, _INVOKE, _END_OF_INVOKE)
    for name, inside in texts(invoked):
        parameters, between = cut_elements(inside, _PARAMETER, _END_OF_PARAMETER)
        arguments = {
            begun.group(1): value if begun.group(2) == "true" else json.loads(value)
            for begun, value in parameters
        }
        require_nothing_left(between)
        calls.append(ParsedCall(name, arguments))
    require_nothing_left(rest)
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
    text, calls, at = (_BARE + body).strip(), [], 0
    while at < len(text):
        _, end = _DECODER.raw_decode(text, at)
        calls += hermes_json(text[at:end], tools)
        at = end_of_space(text, end)
        at = end_of_space(text, at + text.startswith(";", at))
    names = {tool.name for tool in tools}
    if any(call.name not in names for call in calls):
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


def _unfenced(text: str) -> tuple[str, str] | None:
    """The line before a fence and what the fence holds, if there is nothing else."""
    name, _, fenced = text.partition("```")
    fenced = fenced.removeprefix("json").rstrip()
    name = name.strip()
    is_fenced = fenced.startswith("\n") and fenced.endswith("```")
    if not name or "\n" in name or not is_fenced:
        return None
    return name, fenced[1:].removesuffix("```").removesuffix("\n")


def _not_empty(calls: list[ParsedCall]) -> list[ParsedCall]:
    if not calls:
        raise ValueError("no call element")
    return calls
