"""
What LiteLLM takes from a body that it forwards, put back.

It sends Messages and Responses bodies on as they are, less the fields that it does not
know. The plugin's hook puts those, and who asks, into one header: `x-mlx`, ASCII JSON.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

import orjson

from sidecar.core.errors import BadRequest

HEADER = "x-mlx"
_CUT_WITHIN = "output_config"  # of which LiteLLM sends on a part
_WRAPPED = re.compile(rb"litellm:.*response_id:([A-Za-z0-9_-]+)")


def with_client_facts(body: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """
    The body with the fields that LiteLLM cut, and who asks as `x_mlx`.

    What the body itself says counts more than the header, but for who asks: where the
    plugin has said that, a client's own word does not count. Does not change `body`.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    facts = _facts(headers.get(HEADER))
    cut = facts.pop("body", None)
    cut = cut if isinstance(cut, dict) else {}
    whole = {**cut, **body}
    lost, kept = cut.get(_CUT_WITHIN), body.get(_CUT_WITHIN)
    if isinstance(lost, dict) and isinstance(kept, dict):
        whole[_CUT_WITHIN] = {**lost, **kept}
    if HEADER in headers:
        whole["x_mlx"] = facts
    return whole


def inner_id(response_id: str) -> tuple[str, ...]:
    """The id of ours within one that LiteLLM made for a response."""
    packed = response_id.removeprefix("resp_")
    try:
        text = base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError):
        return ()
    found = _WRAPPED.match(text)
    return (found[1].decode(),) if found else ()


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
