"""Images sent to a model that takes text only: refused, or told in words."""

from collections.abc import Sequence
from dataclasses import replace

from sidecar.core.errors import UnsupportedContent
from sidecar.core.requests import Image, Message, Part


def refuse_images(messages: Sequence[Message], why: str) -> None:
    """
    Take text only.

    Args:
        why: the model does.
    Raises:
        UnsupportedContent: naming the first image.
    """
    for message in messages:
        for image in message.images:
            raise UnsupportedContent(
                f"{image.path} is an image: {why}",
                param=image.path,
            )


def note_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with a note in place of each image: an agent's goes on."""
    return tuple(
        replace(message, parts=tuple(map(_noted, message.parts)))
        for message in messages
    )


def _noted(part: Part) -> Part:
    if not isinstance(part, Image):
        return part
    kind = part.source[5:].partition(";")[0] if part.source[:5] == "data:" else "image"
    return f"[{kind[:40]}: not shown, this model takes text only]"
