"""What a client is answered that is refused before LiteLLM, in its route's shape."""

import json
from collections.abc import Mapping
from typing import Any

from litellm_mlx.asgi import Send

# As OpenAI, Anthropic and Google call them.
_NAMES = {
    400: ("invalid_request", "invalid_request_error", "INVALID_ARGUMENT"),
    401: ("invalid_api_key", "authentication_error", "UNAUTHENTICATED"),
    403: ("forbidden", "permission_error", "PERMISSION_DENIED"),
    404: ("resource_not_found", "not_found_error", "NOT_FOUND"),
    408: ("request_timeout", "timeout_error", "DEADLINE_EXCEEDED"),
    413: ("payload_too_large", "request_too_large", "INVALID_ARGUMENT"),
    501: ("not_implemented", "api_error", "UNIMPLEMENTED"),
    503: ("service_unavailable", "overloaded_error", "UNAVAILABLE"),
}


async def answer(
    send: Send, path: str, status: int, message: str, param: str | None = None
) -> None:
    """
    Send a refusal as the whole answer.

    Args:
        status: one of those named above. param: the field at fault, if one is.
    """
    body = json.dumps(_problem(path, status, message, param)).encode()
    headers = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _problem(
    path: str, status: int, message: str, param: str | None
) -> Mapping[str, Any]:
    """An error in the shape of the route's dialect."""
    openai, anthropic, google = _NAMES[status]
    if path.startswith(("/v1/messages", "/messages")):
        return {"type": "error", "error": {"type": anthropic, "message": message}}
    if path.startswith("/v1beta") or ":" in path:
        return {"error": {"code": status, "message": message, "status": google}}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    named = {"type": kind, "param": param, "code": openai}
    return {"error": {"message": message, **named}}
