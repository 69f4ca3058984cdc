"""The list of models, and the health report."""

import time
from typing import Any

# protocols and service do not know each other: entries come as plain values.


def model_entry(
    model_id: str, aliases: tuple[str, ...], max_input_tokens: int | None
) -> dict[str, Any]:
    """One entry of GET /v1/models, with what LiteLLM's model_info wants to know."""
    return {
        "id": model_id,
        "object": "model",
        "created": _STARTED,
        "owned_by": "mlx",
        "aliases": list(aliases),
        "max_input_tokens": max_input_tokens,
        "supports_function_calling": True,
        "supports_reasoning": True,
    }


def model_list(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": entries}


_STARTED = int(time.time())
