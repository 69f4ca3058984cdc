"""What a client is answered that is refused before LiteLLM, in its route's shape."""

import json
from collections.abc import Mapping
from typing import Any

from litellm_mlx.asgi import Message, Send

# As OpenAI, Anthropic and Google call them.
_NAMES = {
    400: ("invalid_request", "invalid_request_error", "INVALID_ARGUMENT"),
    401: ("invalid_api_key", "authentication_error", "UNAUTHENTICATED"),
    403: ("forbidden", "permission_error", "PERMISSION_DENIED"),
    404: ("resource_not_found", "not_found_error", "NOT_FOUND"),
    408: ("request_timeout", "timeout_error", "DEADLINE_EXCEEDED"),
    413: ("payload_too_large", "request_too_large", "INVALID_ARGUMENT"),
    501: ("not_implemented", "api_error", "UNIMPLEMENTED"),
    429: ("rate_limited", "rate_limit_error", "RESOURCE_EXHAUSTED"),
    503: ("service_unavailable", "overloaded_error", "UNAVAILABLE"),
    4: ("invalid_request", "invalid_request_error", "INVALID_ARGUMENT"),  # all others
    5: ("internal_error", "api_error", "INTERNAL"),
}


async def answer(
    send: Send, path: str, status: int, message: str, param: str | None = None
) -> None:
    """
    Send a refusal as the whole answer.

    Args:
        status: one of those named above. param: the field at fault, if one is.
    """
    body = json.dumps(problem(path, status, message, param)).encode()
    headers = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    if status == 429:
        headers.append((b"retry-after", b"1"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def readable(origin: str, send: Send, *, is_from_network: bool = False) -> Send:
    """
    A `send` whose answers a page may read; LiteLLM says so of its own only.

    Args:
        is_from_network: its browser asks whether it may come to this machine at all.
    """
    own = b"access-control-allow-origin"
    added = [(own, origin.encode()), (b"vary", b"Origin")]
    exposed = (b"access-control-expose-headers", b"Retry-After, X-Request-ID")

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ())]
            if own not in {name.lower() for name, _ in headers}:
                headers += added
            headers.append(exposed)  # beside what LiteLLM lets a page read
            if is_from_network:
                headers.append((b"access-control-allow-private-network", b"true"))
            message["headers"] = headers
        await send(message)

    return sending


def is_google(path: str) -> bool:
    """Whether clients of Google's ask there."""
    return path.startswith("/v1beta") or ":" in path


def problem(
    path: str, status: int, message: str, param: str | None = None
) -> Mapping[str, Any]:
    """An error in the shape of the route's dialect."""
    openai, anthropic, google = _NAMES.get(status) or _NAMES[min(status // 100, 5)]
    if path.startswith(("/v1/messages", "/messages")):
        return {"type": "error", "error": {"type": anthropic, "message": message}}
    if is_google(path):
        return {"error": {"code": status, "message": message, "status": google}}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    named = {"type": kind, "param": param, "code": openai}
    return {"error": {"message": message, **named}}
