"""What a model that reads documents is asked where a client sends a picture alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidecar.core.requests import Message

# By the beginning of the model's type: the words that its makers trained it on.
_PROMPTS = {
    "deepseekocr": "Convert the document to markdown.",
    "dots_ocr": "Extract the text content from this image.",
    "glm_ocr": "Text Recognition:",
}


def ocr_prompt(config: Mapping[str, Any]) -> str:
    """A model's own prompt, by its config.json; "" if it reads no documents."""
    kind = str(config.get("model_type", "")).lower()
    found = (words for name, words in _PROMPTS.items() if kind.startswith(name))
    return next(found, "")


def with_prompt(messages: Sequence[Message], prompt: str) -> tuple[Message, ...]:
    """
    The same, with the prompt behind the pictures of a user who says nothing.

    Of all messages, not of the last alone: at the next turn the model reads them again,
    and what was computed of them holds.
    """
    return tuple(
        replace(message, parts=(*message.images, prompt))
        if message.role == "user" and message.images and not _says(message)
        else message
        for message in messages
    )


def _says(message: Message) -> bool:
    return any(isinstance(part, str) and part.strip() for part in message.parts)
