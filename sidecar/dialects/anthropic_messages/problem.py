"""Errors in Anthropic's form."""

from typing import Any

from sidecar.core.errors import ContextLengthExceeded, SidecarError, ThreadUnsupported

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def problem(error: SidecarError, request_id: str) -> dict[str, Any]:
    """The body of an error response."""
    return {"type": "error", "error": error_object(error), "request_id": request_id}


def error_object(error: SidecarError) -> dict[str, Any]:
    """Anthropic's error object; also that of an error in mid-stream."""
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        # The words at which clients compact their history.
        message = f"prompt is too long: {message}"
    body = {"type": _TYPES.get(error.status_hint, "api_error"), "message": message}
    if isinstance(error, ThreadUnsupported):
        # By these the SDK knows to send the whole conversation, without a thread.
        return {**body, "details": {"error_code": error.code, "unsupported": []}}
    return body
