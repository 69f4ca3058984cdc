"""
What past calls of a tool named `write` wrote, as digests in place of the contents.

It is the only thing here that hides from the model what its client sent, so it is done
only where NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT asks for it. A file that was written
once is then a line of the prompt, however long it was. A message that is changed has
other words than its turn had, so that turn's own ids are not put back.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sidecar.core.requests import Message, ToolCall

_TOOL = "write"
_ARGUMENT = "content"
_BARE = "input"  # of a custom tool, whose calls are one text
_MARK = "__WRITE_CONTENT_OMITTED"
_HALF = re.compile("[\ud800-\udfff]")


def omit_written(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages, with a digest of each content that was written."""
    return tuple(_omit(message) for message in messages)


def _omit(message: Message) -> Message:
    calls = tuple(_without_content(call) for call in message.tool_calls)
    return (
        message if calls == message.tool_calls else replace(message, tool_calls=calls)
    )


def _without_content(call: ToolCall) -> ToolCall:
    """
    A call; as it came if it writes nothing.

    Of arguments that cannot be read nobody knows where the content ends: all is hidden.
    """
    if call.name.lower() != _TOOL:
        return call
    try:
        # Models write line breaks into strings as they are.
        arguments = json.loads(call.arguments, strict=False)
    except (ValueError, RecursionError):
        arguments = {_ARGUMENT: call.arguments}
    if not isinstance(arguments, dict):
        return call
    name = _BARE if list(arguments) == [_BARE] else _ARGUMENT
    if name not in arguments:
        return call
    omitted = {**arguments, name: _digest(arguments[name])}
    return replace(call, arguments=_dumped(omitted))


def _dumped(arguments: dict[str, Any]) -> str:
    """JSON; halves of surrogate pairs stay escaped, as a client had to send them."""
    text = json.dumps(arguments, ensure_ascii=False)
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _digest(content: Any) -> str:
    """The line that stands for a content: a hash of 16 digits, and its lengths."""
    if isinstance(content, str):
        data = content.encode("utf-8", "surrogatepass")
        lines = len(content.splitlines())
        lengths = f"bytes={len(data)};chars={len(content)};lines={lines}"
        return f"{_MARK}__sha1={_sha1(data)};{lengths}__"
    data = json.dumps(content, sort_keys=True).encode()
    return f"{_MARK}_NONSTRING__sha1={_sha1(data)};bytes={len(data)}__"


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]
