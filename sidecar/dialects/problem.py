"""Errors on the wire: problem+json that is an OpenAI error body as well."""

from typing import Any

from sidecar.core.errors import AnswerInvalid, SidecarError, ValidationFailed

CONTENT_TYPE = "application/problem+json"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


def problem(error: SidecarError, request_id: str, instance: str) -> dict[str, Any]:
    """The body of an error response (RFC 9457), with OpenAI's `error` object in it."""
    status = error.status_hint
    body: dict[str, Any] = {
        "type": f"urn:litellm-mlx:{error.code}",
        "title": error.code.replace("_", " "),
        "status": status,
        "detail": error.message,
        "instance": instance,
        "request_id": request_id,
        "error_code": error.code,
        "error": error_object(error),
    }
    if isinstance(error, ValidationFailed):
        body["errors"] = [
            {"field": error.param, "message": error.message, "type": "value_error"}
        ]
    if isinstance(error, AnswerInvalid):
        body["error_path"] = error.path
    return body


def error_object(error: SidecarError) -> dict[str, Any]:
    """OpenAI's error object; also the frame of an error in mid-stream."""
    default = "server_error" if error.status_hint >= 500 else "invalid_request_error"
    return {
        "message": error.message,
        "type": _TYPES.get(error.status_hint, default),
        "code": error.code,
        "param": error.param,
    }
