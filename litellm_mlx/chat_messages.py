"""
The messages of a chat, as LiteLLM can read them.

It looks into them before it asks a provider. A content that is a number, or a part of
a user's message whose kind it does not know, is a fault of its own there: 500, though
the sidecar takes some of those parts and says of all others what is wrong with them.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from litellm.types.llms.openai import ValidUserMessageContentTypes

from litellm_mlx import errors

Json = Mapping[str, object]


def readable(messages: Sequence[Json]) -> list[Json]:
    """
    The messages, Responses' names of parts among them as a chat has them.

    Raises:
        litellm.BadRequestError: naming the field.
    """
    return [_message(item, f"messages[{i}]") for i, item in enumerate(messages)]


def _message(message: Json, where: str) -> Json:
    if not isinstance(message.get("role"), str):
        _refuse(f"{where}.role", "must be a string")
    calls = message.get("tool_calls")
    if calls is not None and not _is_calls(calls):
        _refuse(f"{where}.tool_calls", "must be a list of calls, each with a function")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        _refuse(f"{where}.content", "must be a string or a list of parts")
    parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if message["role"] == "user":
        _check_kinds(parts, where)
    return {**message, "content": parts}


def _part(value: object, where: str) -> Json:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if not isinstance(value, Mapping):
        _refuse(where, "must be an object")
    kind = value.get("type")
    if kind == "input_image":
        image = value.get("image_url")
        named = image if isinstance(image, Mapping) else {"url": image}
        detail = {"detail": value["detail"]} if "detail" in value else {}
        return {"type": "image_url", "image_url": {**detail, **named}}
    if kind == "input_text" or (kind is None and "text" in value):
        return {**value, "type": "text"}
    return value


def _check_kinds(parts: Sequence[Json], where: str) -> None:
    for index, part in enumerate(parts):
        kind = part.get("type")
        if kind not in ValidUserMessageContentTypes:
            name = f"{where}.content[{index}].type"
            _refuse(name, f"is {str(kind)[:40]!r}: is not supported")


def _is_calls(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(call, Mapping)
        and isinstance(call.get("function", call.get("custom")), Mapping)
        for call in value
    )


def _refuse(where: str, what: str) -> NoReturn:
    raise errors.refused(where, what)
