"""OpenAI's custom tools: to the model a function with one string, `input`."""

import json
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.dialects.fields import Fields

CUSTOM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def custom_arguments(text: str) -> str:
    """What a client says of a past call, as the function's arguments."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The bare text of a call that the model made."""
    try:
        value = Fields(json.loads(arguments)).text("input")
    except (ValueError, RecursionError, BadRequest):
        value = None
    return arguments if value is None else value
