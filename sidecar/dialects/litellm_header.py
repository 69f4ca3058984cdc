"""
What LiteLLM takes from a body that it forwards, put back.

It sends Messages and Responses bodies on as they are, less the fields that it does not
know. The plugin's hook puts those, and who asks, into one header: `x-mlx`, ASCII JSON.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from sidecar.core.errors import BadRequest

HEADER = "x-mlx"


def with_client_facts(body: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """
    The body with the fields that LiteLLM cut, and who asks as `x_mlx`.

    What the body itself says counts more than the header, but for who asks: where the
    plugin has told that, a client's own word is none. Does not change `body`.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    facts = _facts(headers.get(HEADER))
    cut = facts.pop("body", None)
    whole = {**(cut if isinstance(cut, dict) else {}), **body}
    if HEADER in headers:
        whole["x_mlx"] = facts
    return whole


def _facts(header: str | None) -> dict[str, Any]:
    if not header:
        return {}
    try:
        facts = orjson.loads(header)
    except orjson.JSONDecodeError:
        facts = None
    if not isinstance(facts, dict):
        raise BadRequest(f"the header {HEADER} must be a JSON object", param=HEADER)
    return facts
