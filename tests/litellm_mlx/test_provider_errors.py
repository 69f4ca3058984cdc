"""The sidecar's refusals and a failing connection, as LiteLLM's exceptions."""

import json
from typing import Any

import httpx
import litellm
import pytest

from litellm_mlx import answers, errors
from litellm_mlx.translate import completion_from
from tests.litellm_mlx.sidecar_answers import problem


def refusal(status: int, code: str, text: str, **headers: str) -> httpx.Response:
    script = problem(status, code, text, **headers)
    named = dict(script.headers)
    return httpx.Response(status, json=script.problem, headers=named)


@pytest.mark.parametrize(
    ("status", "code", "expected", "shown"),
    [
        (400, "invalid_request", litellm.BadRequestError, 400),
        (400, "context_length_exceeded", litellm.ContextWindowExceededError, 400),
        (401, "unauthorized", litellm.AuthenticationError, 401),
        (403, "forbidden", litellm.PermissionDeniedError, 403),
        (404, "model_not_found", litellm.NotFoundError, 404),
        (408, "request_timeout", litellm.Timeout, 408),
        (409, "model_pinned", litellm.BadRequestError, 400),
        (413, "payload_too_large", litellm.BadRequestError, 400),
        (422, "validation_error", litellm.BadRequestError, 400),
        (429, "rate_limited", litellm.RateLimitError, 429),
        (500, "generation_error", litellm.InternalServerError, 500),
        (501, "not_implemented", litellm.APIError, 501),
        (503, "service_unavailable", litellm.ServiceUnavailableError, 503),
        (507, "other", litellm.InternalServerError, 500),
    ],
)
def test_each_refusal_has_its_class(
    status: int, code: str, expected: type[Exception], shown: int
) -> None:
    """The router goes by the class, the client by the status."""
    error: Any = errors.from_response(refusal(status, code, "because"), "m")
    assert type(error) is expected
    assert error.status_code == shown
    assert error.llm_provider == "mlx"
    assert "because" in str(error)
    assert code in str(error)
    frame: Any = errors.from_delimiters({"message": "because", "code": code}, "m")
    if code not in ("model_pinned", "other"):
        assert type(frame) is expected


def test_retry_after_is_told_but_not_obeyed() -> None:
    """On the exception's response the router would sleep for it."""
    answer = refusal(503, "service_unavailable", "loading", retry_after="7")
    error: Any = errors.from_response(answer, "m")
    assert "retry after 7 s" in str(error)
    assert "retry-after" not in error.response.headers


@pytest.mark.parametrize("body", [b"", b"<html>no</html>", b"[1]", b'{"error":"x"}'])
def test_foreign_bodies_still_give_a_message(body: bytes) -> None:
    """Something else than the sidecar may listen on that port."""
    error = errors.from_response(httpx.Response(502, content=body), "m")
    assert isinstance(error, litellm.ServiceUnavailableError)
    assert "502" in str(error)


@pytest.mark.parametrize(
    ("error", "started", "expected"),
    [
        (httpx.ConnectError("refused"), False, litellm.ServiceUnavailableError),
        (httpx.ConnectTimeout("slow"), False, litellm.ServiceUnavailableError),
        (httpx.ReadTimeout(""), False, litellm.Timeout),
        (httpx.ReadTimeout(""), True, litellm.Timeout),
        (httpx.ReadError(""), False, litellm.ServiceUnavailableError),
        (httpx.ReadError(""), True, litellm.InternalServerError),
        (httpx.RemoteProtocolError("x"), True, litellm.InternalServerError),
    ],
)
def test_transport_failures(
    error: httpx.HTTPError, started: bool, expected: type[Exception]
) -> None:
    """Never an empty text, never a class that is not cooled down."""
    mapped = errors.from_transport(error, "m", started=started)
    assert type(mapped) is expected
    assert "MLX sidecar" in str(mapped)
    assert type(error).__name__ in str(mapped)
    assert "APIConnectionError" not in str(mapped)


def test_an_answer_that_is_no_completion_is_an_error() -> None:
    """A 200 alone proves nothing."""
    for body in (b"", b"[]", b"{}", b'{"object":"x"}'):
        with pytest.raises(litellm.InternalServerError):
            completion_from(httpx.Response(200, content=body), "m")
    frame = b'{"error":{"message":"late","code":"service_unavailable"}}'
    with pytest.raises(litellm.ServiceUnavailableError, match="late"):
        completion_from(httpx.Response(200, content=frame), "m")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("rate limit: at most 2 requests a minute (RATE_LIMIT_RPM); again in 22 s", b"22"),
     ("x (sidecar answered 429, rate_limited, retry after 31 s)", b"31"),
     ("the queue is full", b"5")],
)  # fmt: skip
def test_a_refusals_own_words_say_when_to_ask_again(text: str, seconds: bytes) -> None:
    """Where LiteLLM has lost the header: Messages, raw completions."""
    body = json.dumps({"type": "error", "error": {"message": text}}).encode()
    start = {"type": "http.response.start", "status": 429, "headers": []}
    held = [start, {"type": "http.response.body", "body": body}]
    found = dict(answers.put_right("/v1/messages", held)[0]["headers"])
    assert found[b"retry-after"] == seconds
