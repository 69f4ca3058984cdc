"""
Tools that a client loads when they are needed: defined where it says that it did.

A tool with `defer_loading` stands in no prompt until a `tool_reference` in a tool's
result names it, and then there. So loading one appends to the conversation; at its
place among the other tools, before all messages, everything behind would be computed
again. A deferred tool that no reference names is offered as any other: the search for
it may be one that Anthropic runs.
Source: https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-search-tool
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidecar.core.requests import Tool


def with_definitions(
    body: Mapping[str, Any], tools: Sequence[Tool]
) -> tuple[Mapping[str, Any], tuple[Tool, ...]]:
    """
    A body with the definitions of deferred tools in place of references to them.

    Args:
        tools: of the body; the deferred ones say so.
    Returns:
        It, and its tools: only those are still deferred that are defined in it.
    """
    deferred = {tool.name: tool for tool in tools if tool.is_deferred}
    found = {_name(block) for block in _result_blocks(body)} & deferred.keys()
    left = tuple(replace(t, is_deferred=t.name in found) for t in tools)
    if not found:
        return body, left
    texts = {name: _definition(deferred[name]) for name in found}
    messages = [_message(message, texts) for message in body["messages"]]
    return {**body, "messages": messages}, left


def _result_blocks(body: Mapping[str, Any]) -> Iterator[Any]:
    """What stands in the results of tools; what is wrong there is found elsewhere."""
    for message in _list(body.get("messages")):
        for block in _list(_of(message).get("content")):
            if _of(block).get("type") == "tool_result":
                yield from _list(_of(block).get("content"))


def _message(message: Any, texts: Mapping[str, str]) -> Any:
    blocks = _list(_of(message).get("content"))
    defined = [_block(block, texts) for block in blocks]
    return message if defined == [*blocks] else {**message, "content": defined}


def _block(block: Any, texts: Mapping[str, str]) -> Any:
    if _of(block).get("type") != "tool_result":
        return block
    content = _list(block.get("content"))
    if texts.keys().isdisjoint(map(_name, content)):
        return block
    said = [
        {"type": "text", "text": texts[name]} if (name := _name(b)) in texts else b
        for b in content
    ]
    return {**block, "content": said}


def _name(block: Any) -> str:
    """The tool that a reference names; "": it is none."""
    is_reference = _of(block).get("type") == "tool_reference"
    name = _of(block).get("tool_name") if is_reference else ""
    return name if isinstance(name, str) else ""


def _definition(tool: Tool) -> str:
    return json.dumps(tool.raw, ensure_ascii=False)


def _of(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
