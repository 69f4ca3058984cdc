"""
Passes on the header that names the fields which the sidecar ignored.

LiteLLM sends on the headers of some answers only, under a prefix. Its logging object is
the same from the provider to the proxy: there they are kept. On Google's route it asks
no hook for headers: there the gate adds what the request's context has collected.
"""

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from litellm_mlx.asgi import Message, Send
from litellm_mlx.google_body import in_vain
from litellm_mlx.json_objects import as_object, json_object

IGNORED = "x-litellm-mlx-ignored"
_KEPT = "response_headers"  # where LiteLLM itself keeps them of Messages
_PREFIX = "llm_provider-"
_ODD = re.compile(r"[^A-Za-z0-9_.=\[\]/-]")
_MAX_NAMES, _MAX_NAME_CHARS = 32, 80  # as the sidecar's own header
# Tasks that LiteLLM starts for a request have a copy of the context, so the same list.
_named: ContextVar[list[str] | None] = ContextVar("litellm_mlx_ignored", default=None)


def note(call: Mapping[str, object], headers: Mapping[str, str]) -> None:
    """Keep the headers of a call's answer."""
    kept = getattr(call.get("logging_obj"), "model_call_details", None)
    if isinstance(kept, dict):
        kept[_KEPT] = dict(headers)


def note_of(answer: object) -> None:
    """Collect what the sidecar named with an answer on Google's route."""
    named = _named.get()
    hidden = as_object(getattr(answer, "_hidden_params", None))
    ignored = as_object(hidden.get("additional_headers")).get(_PREFIX + IGNORED)
    if named is not None and ignored:
        named.append(str(ignored))


def on_googles_route(body: bytes, send: Send) -> Send:
    """What sends an answer with the names of what its request's body has in vain."""
    named = in_vain(json_object(body))
    _named.set(named)

    async def sending(message: Message) -> None:
        is_answer = message["type"] == "http.response.start" and message["status"] < 400
        if is_answer and named:
            header = (IGNORED.encode(), _in_one_line(named))
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return sending


def _in_one_line(named: Sequence[str]) -> bytes:
    """Names that a client wrote: nothing odd, none too long, and not too many."""
    each = (name for joined in named for name in joined.split(", "))
    shown = [_ODD.sub("?", name)[:_MAX_NAME_CHARS] for name in each]
    return ", ".join(shown[:_MAX_NAMES]).encode()


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
