"""
What went wrong at the sidecar, as LiteLLM's own exceptions.

LiteLLM's router decides by exception class: which error is retried, which one
falls back, which one takes a deployment out of rotation. An exception it does not
know becomes a 500 that never cools a dead deployment down.

A `Retry-After` goes into the text only, and from there to the client (`hook.py`). On
the exception's `response` the router would sleep for it before each retry, and so
before a fallback.
"""

import re
from collections.abc import Callable, Mapping

import httpx
import litellm

from litellm_mlx.json_objects import as_object, json_object

PROVIDER = "mlx"
_SHOWN_LEN = 500
_RETRY_AFTER = re.compile(r"\(sidecar answered [^()]*, retry after (\d+) s\)")
_CONTEXT_CODE = "context_length_exceeded"
_NATIVE_PREFIX = "MlxException - "  # before what LiteLLM was answered on a native route

# Error frames inside a stream carry a code but no status.
_STATUS_OF_CODE = {
    "invalid_request": 400,
    _CONTEXT_CODE: 400,
    "unauthorized": 401,
    "forbidden": 403,
    "model_not_found": 404,
    "adapter_not_found": 404,
    "resource_not_found": 404,
    "request_timeout": 408,
    "payload_too_large": 413,
    "validation_error": 422,
    "answer_invalid": 422,
    "rate_limited": 429,
    "rate_limit_exceeded": 429,
    "not_implemented": 501,
    "service_unavailable": 503,
    "training": 503,
    "insufficient_memory": 503,
    "memory_pressure": 503,
}


def from_response(response: httpx.Response, model: str) -> Exception:
    """Map a refusal, its body already read, to the exception the router knows."""
    problem = json_object(response.content)
    error = as_object(problem.get("error"))
    text = error.get("message") or problem.get("detail") or problem.get("title")
    code = error.get("code") or problem.get("error_code")
    message = f"{text or response.text[:_SHOWN_LEN] or 'no reason given'}"
    message += f" (sidecar answered {response.status_code}{f', {code}' if code else ''}"
    if "retry-after" in response.headers:
        message += f", retry after {response.headers['retry-after']} s"
    made = make_error(response.status_code, str(code), message + ")", model)
    made.param = error.get("param")  # type: ignore[attr-defined]  # for the client
    return made


def from_delimiters(error: object, model: str) -> Exception:
    """Map an error that came inside a stream; a status is guessed from its code."""
    fields = as_object(error)
    code = str(fields.get("code") or fields.get("type") or "")
    text = fields.get("message") or str(error)[:_SHOWN_LEN]
    status = _STATUS_OF_CODE.get(code, 500)
    message = f"{text} (sidecar broke off the answer{f', {code}' if code else ''})"
    return make_error(status, code, message, model)


def from_transport(error: httpx.HTTPError, model: str, *, started: bool) -> Exception:
    """
    Map a failure of the connection itself.

    Args:
        started: the sidecar had begun to answer.
    """
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return make_error(503, "", f"the MLX sidecar is not reachable: {reason}", model)
    if isinstance(error, httpx.TimeoutException):
        return make_error(408, "", f"the MLX sidecar fell silent: {reason}", model)
    if started:
        return make_error(
            500, "", f"the MLX sidecar broke off its answer: {reason}", model
        )
    return make_error(503, "", f"the MLX sidecar did not answer: {reason}", model)


def unfinished(model: str) -> Exception:
    """The error for a stream that ended without a finish reason."""
    # LiteLLM would invent "stop" and pass half an answer off as a whole one.
    text = "the MLX sidecar ended the stream without a finish_reason"
    return make_error(500, "", text, model)


def malformed(model: str, what: str) -> Exception:
    """The error for an answer that cannot be read."""
    return make_error(500, "", f"the MLX sidecar sent {what}", model)


def retry_after(error: BaseException | None) -> str | None:
    """Seconds after which the sidecar wants to be asked again, if an error says so."""
    while error is not None:
        said = _RETRY_AFTER.search(str(error))
        headers = getattr(getattr(error, "response", None), "headers", {})
        if said or "retry-after" in headers:
            return said[1] if said else str(headers["retry-after"])
        error = error.__cause__ or error.__context__
    return None


def refused(where: str, what: str) -> Exception:
    """The error for a field that LiteLLM itself would stumble over."""
    # A client has named it, and LiteLLM looks through all that an error says.
    where, what = where[:_SHOWN_LEN], what[:_SHOWN_LEN]
    error = make_error(400, "", f"{where} {what}", "")
    error.param = where  # type: ignore[attr-defined]  # for the client
    return error


def make_error(status: int, code: str, message: str, model: str) -> Exception:
    """Build the litellm exception for an HTTP status and a sidecar error code."""
    named = {"message": message, "llm_provider": PROVIDER, "model": model}
    if code == _CONTEXT_CODE:
        # The only class that `context_window_fallbacks` listens to.
        return _built(litellm.ContextWindowExceededError, named)
    if status == 403:
        request = httpx.Request("POST", "http://sidecar")  # the constructor wants one
        answer = httpx.Response(403, request=request)
        return _built(litellm.PermissionDeniedError, {**named, "response": answer})
    if status == 501:
        return _built(litellm.APIError, {**named, "status_code": status})
    return _built(_CLASS_OF_STATUS.get(status) or _class_of_range(status), named)


_CLASS_OF_STATUS: Mapping[int, Callable[..., Exception]] = {
    401: litellm.AuthenticationError,
    404: litellm.NotFoundError,
    408: litellm.Timeout,
    429: litellm.RateLimitError,
    502: litellm.ServiceUnavailableError,
    503: litellm.ServiceUnavailableError,
    504: litellm.Timeout,
}


def _class_of_range(status: int) -> Callable[..., Exception]:
    refused: Callable[..., Exception] = litellm.BadRequestError
    failed: Callable[..., Exception] = litellm.InternalServerError
    return refused if 400 <= status < 500 else failed


def _built(kind: Callable[..., Exception], named: Mapping[str, object]) -> Exception:
    return kind(**named)
