"""The messages of an answer on channels, as gpt-oss writes them, as rules."""

from sidecar.core.requests import Tool
from sidecar.output.grammars.call_rules import json_arguments
from sidecar.output.grammars.lark import Tokens, mark, text


def channel_call(number: int, tool: Tool, tokens: Tokens) -> list[str]:
    """A message to `functions.NAME`, as gpt-oss writes it."""
    channel, message = mark("<|channel|>", tokens), mark("<|message|>", tokens)
    head = text(f"commentary to=functions.{tool.name} ")
    kind = f'{mark("<|constrain|>", tokens)} "json"'
    return [
        f"call{number}: {channel} {head} {kind} {message} arguments{number}",
        json_arguments(number, tool),
    ]


def channel_thoughts(tokens: Tokens) -> str:
    """Messages of thinking, each with the role of the next one."""
    channel, message = mark("<|channel|>", tokens), mark("<|message|>", tokens)
    end, start = mark("<|end|>", tokens), mark("<|start|>", tokens)
    head = f'{channel} "analysis" {message}'
    return f'({head} /(?s:.*)/ {end} {start} "assistant")*'


def channel_final(tokens: Tokens) -> str:
    """What stands before the text of the answer."""
    return f'{mark("<|channel|>", tokens)} "final" {mark("<|message|>", tokens)}'
