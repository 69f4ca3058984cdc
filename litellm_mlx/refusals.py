"""What a client is answered that is refused before LiteLLM, in its route's shape."""

import json
from collections.abc import Mapping
from typing import Any

from litellm_mlx.admission import Refusal
from litellm_mlx.asgi import Send

_STATUS = {"forbidden": 403, "unauthorized": 401, "invalid_request": 400}
_ANTHROPIC_TYPES = {
    "forbidden": "permission_error",
    "unauthorized": "authentication_error",
    "invalid_request": "invalid_request_error",
}
_GOOGLE_NAMES = {
    "forbidden": "PERMISSION_DENIED",
    "unauthorized": "UNAUTHENTICATED",
    "invalid_request": "INVALID_ARGUMENT",
}


async def answer(send: Send, path: str, why: Refusal) -> None:
    """Send a refusal as the whole answer."""
    status = _STATUS[why.kind]
    body = json.dumps(_problem(path, status, why)).encode()
    headers = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    if why.kind == "unauthorized":
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _problem(path: str, status: int, why: Refusal) -> Mapping[str, Any]:
    """An error in the shape of the route's dialect."""
    if path.startswith(("/v1/messages", "/messages")):
        kind = _ANTHROPIC_TYPES[why.kind]
        return {"type": "error", "error": {"type": kind, "message": why.message}}
    if path.startswith("/v1beta") or ":" in path:
        name = _GOOGLE_NAMES[why.kind]
        return {"error": {"code": status, "message": why.message, "status": name}}
    code = "invalid_api_key" if why.kind == "unauthorized" else why.kind
    named = {"type": "invalid_request_error", "param": why.param, "code": code}
    return {"error": {"message": why.message, **named}}
