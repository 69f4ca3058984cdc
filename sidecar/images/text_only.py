"""Images sent to a model that takes text only: refused, or replaced by words."""

from collections.abc import Sequence
from dataclasses import replace

from sidecar.core.errors import UnsupportedContent
from sidecar.core.requests import Image, Message, Part


def without_images(
    messages: Sequence[Message], policy: str, why: str
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """
    The conversation with a note in place of each image, and where those stood.

    Args:
        policy: UNSUPPORTED_IMAGES. `error` refuses all; `auto` those of the newest user
            message: what a tool read, or an earlier message holds, the client sends
            again and again, and would never get on.
        why: the model takes text only.
    Raises:
        UnsupportedContent: naming the first image that is refused.
    """
    first = {"error": 0, "auto": _newest_user(messages)}.get(policy, len(messages))
    for message in messages[first:]:
        if policy == "error" or message.role == "user":
            _refuse(message, why)
    paths = tuple(image.path for message in messages for image in message.images)
    noted = (replace(m, parts=tuple(map(_noted, m.parts))) for m in messages)
    return tuple(noted), paths


def _newest_user(messages: Sequence[Message]) -> int:
    """
    Where the newest user message is.

    One before it that nobody has answered was refused, and its user has gone on.
    """
    roles = [message.role for message in messages]
    return len(roles) - 1 - roles[::-1].index("user") if "user" in roles else len(roles)


def _refuse(message: Message, why: str) -> None:
    """Claude Code knows the first words: it takes the image out, and asks again."""
    for image in message.images:
        remedy = "UNSUPPORTED_IMAGES=note puts words in its place"
        text = f"Could not process image: {image.path} is an image: {why}; {remedy}"
        raise UnsupportedContent(text, param=image.path)


def _noted(part: Part) -> Part:
    if not isinstance(part, Image):
        return part
    kind = part.source[5:].partition(";")[0] if part.source[:5] == "data:" else "image"
    return f"[{kind[:40]}: not shown, this model takes text only]"
