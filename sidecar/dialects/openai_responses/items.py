"""Input items of the Responses API -> messages of ours, in order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sidecar.core.errors import BadRequest, UnsupportedContent
from sidecar.core.requests import Message, Part, Role, Thought, ToolCall
from sidecar.core.turn_token import read_token
from sidecar.dialects.custom_tools import custom_arguments
from sidecar.dialects.fields import Fields
from sidecar.dialects.image_parts import (
    OPENAI_KINDS,
    openai_image,
    refuse,
    require_text,
)
from sidecar.dialects.openai_responses import tool_items
from sidecar.dialects.openai_responses.tools import model_tool_name

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_COMPACTED = ("compaction", "compaction_summary", "compaction_trigger")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text")


@dataclass(frozen=True, slots=True)
class ReadItems:
    """Items as messages; `unread`: the types of those that say nothing to a model."""

    messages: tuple[Message, ...]
    unread: tuple[str, ...]


def read_items(items: Iterable[Fields]) -> ReadItems:
    """The conversation; assistant items in a row are one message."""
    reader = _Reader()
    for item in items:
        reader.take(item)
    return ReadItems(tuple(reader.finish()), tuple(dict.fromkeys(reader.unread)))


class _Reader:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self.unread: list[str] = []
        self._forget()

    def _forget(self) -> None:
        self._parts: list[Part] = []
        self._thoughts: list[Thought] = []
        self._calls: list[ToolCall] = []

    def take(self, item: Fields) -> None:
        kind = item.text("type") or "message"
        if kind == "reasoning":
            self._begin_turn()
            self._thoughts.append(_thought(item))
        elif kind in ("function_call", "custom_tool_call"):
            self._calls.append(_call(item, kind))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._flush()
            parts = _parts(item.raw("output"), item.path("output"))
            call_id = item.text("call_id")
            self._messages.append(Message("tool", parts, tool_call_id=call_id))
        elif kind == "message":
            self._message(item)
        elif kind in tool_items.OUTPUTS:
            self._flush()
            self._messages.append(tool_items.result(item))
        elif kind in tool_items.CALLS:
            self._calls.append(tool_items.CALLS[kind](item))
            self._end_call(tool_items.result_in_call(item, kind))
        elif kind in _COMPACTED:
            raise UnsupportedContent(
                f"{item.path('type')} is {kind!r}: OpenAI alone can read or make it; "
                "send the items themselves",
                param=item.path("type"),
            )
        else:
            self.unread.append(kind[:40])

    def finish(self) -> list[Message]:
        self._flush()
        return self._messages

    def _end_call(self, result: Message | None) -> None:
        """Hosted tools answer at once, in the call's own item."""
        if result is not None:
            self._flush()
            self._messages.append(result)

    def _message(self, item: Fields) -> None:
        role = _ROLES.get(item.required_text("role"))
        if role is None:
            raise BadRequest(
                f"{item.path('role')} must be one of {', '.join(_ROLES)}",
                param=item.path("role"),
            )
        parts = _parts(item.raw("content"), item.path("content"))
        require_text(parts, role)
        if role == "assistant":
            self._parts += [part for part in parts if part]
        else:
            self._flush()
            self._messages.append(Message(role, parts))

    def _begin_turn(self) -> None:
        """Thinking behind a call or a text begins another turn."""
        if self._calls:
            self._flush()

    def _flush(self) -> None:
        if self._parts or self._thoughts or self._calls:
            texts = [thought.text for thought in self._thoughts if thought.text]
            self._messages.append(
                Message(
                    "assistant",
                    tuple(self._parts),
                    "\n".join(texts) or None,
                    tuple(self._calls),
                    thoughts=tuple(self._thoughts),
                )
            )
        self._forget()


def _thought(item: Fields) -> Thought:
    """Its content, else its summary, else what its token carries."""
    token = item.text("encrypted_content")
    texts = [part.text("text") or "" for part in item.objects("content")]
    text = "".join(texts)
    if not text:
        parts = [part.text("text") or "" for part in item.objects("summary")]
        text = _joined(parts, token)
    known = read_token(token)
    return Thought(text or (known and known.text) or "", token)


def _joined(parts: list[str], token: str | None) -> str:
    """Summary parts as the text they were; some clients make one of each delta."""
    known = read_token(token)
    joined = "".join(parts)
    return joined if known and known.is_of(joined) else "\n".join(parts)


def _call(item: Fields, kind: str) -> ToolCall:
    name = model_tool_name(item.required_text("name"), item.text("namespace"))
    if kind == "custom_tool_call":
        arguments = custom_arguments(item.text("input") or "")
    else:
        arguments = item.text("arguments") or ""
    return ToolCall(item.text("call_id") or item.text("id") or "", name, arguments)


def _parts(value: Any, path: str) -> tuple[Part, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be a string or a list of parts", param=path)
    return tuple(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(value: Any, path: str) -> Part:
    if isinstance(value, str):
        return value
    part = Fields(value, path)
    kind = part.text("type") or "text"
    if kind in OPENAI_KINDS:
        return openai_image(part)
    if kind not in _TEXT_PARTS:
        refuse(part, kind)
    return part.text("text") or part.text("refusal") or ""
