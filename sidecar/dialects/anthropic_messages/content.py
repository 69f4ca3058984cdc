"""Content blocks of the Messages API -> messages of ours, in order."""

import json
import logging
from collections.abc import Iterator
from typing import Any

from sidecar.core.errors import BadRequest, UnsupportedContent
from sidecar.core.requests import Message, Part, Thought, ToolCall
from sidecar.core.turn_token import read_token
from sidecar.dialects.fields import Fields
from sidecar.dialects.image_parts import anthropic_image, refuse, unread_file

logger = logging.getLogger(__name__)

_ERROR_WORDS = ("error", "failed", "exception", "traceback")
# Of the last two the model would read the same words, and have the same tools.
_REFUSED = ("audio", "video", "container_upload", "tool_addition", "tool_removal")
_UNNAMED_FIELDS = ("type", "id", "tool_use_id", "cache_control")
_FILE_SOURCES = ("base64", "url", "file")
_LOOKED_AT = 64  # characters in which a failed result may say so itself


def text_parts(value: Any, path: str) -> tuple[str, ...]:
    """A string, or a list of text blocks."""
    return tuple(_text(block) for block in _as_blocks(value, path))


def read_message(item: Fields) -> Iterator[Message]:
    """One message; a user's tool results are messages of their own."""
    role = item.required_text("role")
    path, value = item.path("content"), item.raw("content")
    if role == "system":
        yield Message("system", text_parts(value, path))
    elif role == "assistant":
        yield _assistant(_as_blocks(value, path))
    elif role == "user":
        yield from _user(_as_blocks(value, path))
    else:
        raise BadRequest(
            f"{item.path('role')} must be user, assistant or system",
            param=item.path("role"),
        )


def _as_blocks(value: Any, path: str) -> list[Fields]:
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, path)]
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be a string or a list of blocks", param=path)
    return list(_blocks(value, path))


def _blocks(value: list[Any], path: str) -> Iterator[Fields]:
    for index, block in enumerate(value):
        where = f"{path}[{index}]"
        yield (
            Fields({"type": "text", "text": block}, where)
            if isinstance(block, str)
            else Fields(block, where)
        )


def _user(blocks: list[Fields]) -> Iterator[Message]:
    parts: list[Part] = []
    if not blocks:
        yield Message("user")
    for block in blocks:
        if block.text("type") == "tool_result":
            if parts:
                yield Message("user", tuple(parts))
                parts = []
            yield _tool_result(block)
        else:
            parts.append(_part(block))
    if parts:
        yield Message("user", tuple(parts))


def _tool_result(block: Fields) -> Message:
    value = block.raw("content")
    blocks = _as_blocks(value, block.path("content")) if value is not None else []
    parts = tuple(map(_part, blocks))
    if block.boolean("is_error", False):
        parts = _marked_as_error(parts)
    return Message("tool", parts, tool_call_id=block.text("tool_use_id"))


def _marked_as_error(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    texts = [part for part in parts if isinstance(part, str)]
    head = "".join(texts)[:_LOOKED_AT].lower()
    return parts if any(word in head for word in _ERROR_WORDS) else ("[error]", *parts)


def _assistant(blocks: list[Fields]) -> Message:
    parts: list[str] = []
    thoughts: list[Thought] = []
    calls: list[ToolCall] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "thinking":
            thoughts.append(
                Thought(block.text("thinking") or "", block.text("signature"))
            )
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "redacted_thinking":  # not ours: we make none
            thoughts.append(Thought("", block.text("data") or "redacted"))
        else:
            parts.append(_text(block))
    return Message(
        "assistant",
        tuple(parts),
        read_reasoning(thoughts),
        tuple(calls),
        thoughts=tuple(thoughts),
    )


def read_reasoning(thoughts: list[Thought]) -> str | None:
    """The thinking as text: as it came, or as its token carries it."""
    texts = []
    for thought in thoughts:
        token = read_token(thought.token)
        texts.append(thought.text or (token and token.text) or "")
    return "\n".join(text for text in texts if text) or None


def _call(block: Fields) -> ToolCall:
    arguments = json.dumps(block.object("input") or {}, ensure_ascii=False)
    name = block.required_text("name")
    return ToolCall(block.text("id") or "", name, arguments)


def _part(block: Fields) -> Part:
    kind = block.text("type")
    if kind == "image":
        return anthropic_image(block)
    return _unread_document(block) if kind == "document" else _text(block)


def _unread_document(block: Fields) -> Part:
    """What a document says; of one that is a file (a PDF) that it is there."""
    source = Fields(block.raw("source"), block.path("source"))
    if source.text("type") not in _FILE_SOURCES:
        return _document(block)
    return unread_file(f"data:{source.text('media_type') or ''};", block.where)


def _text(block: Fields) -> str:
    """The text of a block; of one unknown here, what it says."""
    kind = block.text("type") or "text"
    if kind == "text":
        return block.text("text") or ""
    if kind == "image":
        raise UnsupportedContent(
            f"{block.where} is an image: images are taken in user messages and tool "
            "results",
            param=block.where,
        )
    if kind in _REFUSED:
        refuse(block, kind)
    if kind == "document":
        return _document(block)
    logger.info("took a block as text type=%r", kind[:40])
    return _said(block)


def _said(block: Fields) -> str:
    """What a block of a kind unknown here says: its content, else its fields."""
    block.require_printable()
    value = block.raw("content")
    value = [value] if isinstance(value, dict) else value
    parts = text_parts(value, block.path("content")) if value else ()
    source = block.raw("source")
    places = (source if isinstance(source, str) else "", block.text("url") or "")
    names = (block.text("title") or "", *places)
    said = "\n".join(part for part in (*names, *parts) if part)
    fields = {
        name: value
        for name, value in block.whole.items()
        if name not in _UNNAMED_FIELDS and not name.startswith("encrypted")
    }
    return said or (json.dumps(fields, ensure_ascii=False) if fields else "")


def _document(block: Fields) -> str:
    source = Fields(block.raw("source"), block.path("source"))
    kind = source.text("type")
    if kind == "text":
        body = source.text("data") or ""
    elif kind == "content":
        body = "\n".join(text_parts(source.raw("content"), source.path("content")))
    else:
        raise BadRequest(
            f"{source.path('type')} is {str(kind)[:40]!r}: it must be plain text",
            param=source.path("type"),
        )
    return "\n".join(part for part in (block.text("title") or "", body) if part)
