"""
The header that names what the sidecar was asked for in vain, on its way to the client.

LiteLLM sends on the headers of some answers only, under a prefix. Its logging object is
the same from the provider to the proxy: there they are kept.
"""

from collections.abc import Mapping

from litellm_mlx.errors import as_object
from litellm_mlx.translate import IGNORED

_KEPT = "response_headers"  # where LiteLLM itself keeps them of Messages
_PREFIX = "llm_provider-"


def note(call: Mapping[str, object], headers: Mapping[str, str]) -> None:
    """Keep the headers of a call's answer."""
    kept = getattr(call.get("logging_obj"), "model_call_details", None)
    if isinstance(kept, dict):
        kept[_KEPT] = dict(headers)


def of_answer(data: Mapping[str, object], answer: object) -> dict[str, str]:
    """
    The header for the client; none if nothing was asked for in vain.

    Args:
        data: LiteLLM's, of the request. answer: whole or a stream.
    """
    kept = getattr(data.get("litellm_logging_obj"), "model_call_details", None)
    hidden = as_object(getattr(answer, "_hidden_params", None))
    places = (
        as_object(as_object(kept).get(_KEPT)).get(IGNORED),
        as_object(hidden.get("additional_headers")).get(_PREFIX + IGNORED),
    )
    return next(({IGNORED: str(value)} for value in places if value), {})
