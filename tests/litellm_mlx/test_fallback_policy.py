"""Which failures of a local model another one may answer."""

import json
from dataclasses import replace

import litellm
import pytest

from litellm_mlx.errors import PROVIDER
from litellm_mlx.fallback_policy import is_refusal
from sidecar.config.settings import ServerConfig
from sidecar.core.errors import RateLimitExceeded
from sidecar.dialects.anthropic_messages.stream import AnthropicMessages
from sidecar.service.rate_limits import RateLimits

TOO_LONG = "prompt is too long"
QUOTED = (
    f'{TOO_LONG}: ContextWindowExceeded "code": "context_length_exceeded" '
    "(sidecar answered 400, context_length_exceeded)"
)


def _problem(code: str, message: str) -> str:
    """A body of the sidecar's as LiteLLM passes it on."""
    error = {"type": "invalid_request_error", "code": code, "message": message}
    body = json.dumps({"type": "error", "error": error})
    return f"litellm.BadRequestError: MlxException - {body}"


def _messages_problem() -> str:
    """What is said on Messages to who asks too often: it has no code."""
    limits = RateLimits(replace(ServerConfig(), requests_per_minute=1))
    limits.begin("one")
    with pytest.raises(RateLimitExceeded) as error:
        limits.begin("one")
    _, body = AnthropicMessages().problem(error.value, "r", "/v1/messages")
    return f"litellm.RateLimitError: MlxException - {json.dumps(body)}"


def failure(status: int, text: str) -> Exception:
    """What LiteLLM's router is told of a call to the sidecar."""
    return litellm.APIError(status, text, PROVIDER, "mlx/local")


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (failure(400, "stop must be a string"), True),
        (failure(503, "the model is still loading"), False),
        (failure(400, "x (sidecar answered 400, context_length_exceeded)"), False),
        (failure(400, _problem("context_length_exceeded", "it is 9 long")), False),
        (failure(400, _problem("invalid_request", f"{TOO_LONG}: 9 tokens")), False),
        (litellm.ContextWindowExceededError("9 tokens", "local", PROVIDER), False),
        # What a client wrote, and a refusal quotes.
        (failure(400, f"got '{QUOTED}' (sidecar answered 400, invalid_request)"), True),
        (failure(400, _problem("invalid_request", f"got {QUOTED}")), True),
        (
            litellm.ContextWindowExceededError(
                _problem("invalid_request", f"got {QUOTED}"), "local", PROVIDER
            ),
            True,
        ),
        (failure(499, '{"code": "request_cancelled"}'), True),
        (failure(429, "the queue is full (sidecar answered 429, rate_limited)"), False),
        (failure(429, _problem("rate_limited", "queue; rate limit: 9")), False),
        (failure(429, "x (sidecar answered 429, rate_limit_exceeded)"), True),
        (failure(429, _messages_problem()), True),
        # Before the first text LiteLLM makes another error of it, of another status.
        (
            litellm.ServiceUnavailableError(
                "MidStreamFallbackError: the request was cancelled", PROVIDER, "local"
            ),
            True,
        ),
    ],
    ids=[
        "refused",
        "loading",
        "too long",
        "too long, by code",
        "too long, by message",
        "too long, says LiteLLM",
        "quoted",
        "quoted in a body",
        "misread by LiteLLM",
        "cancelled",
        "busy",
        "busy, on a native route",
        "too often",
        "too often, on Messages",
        "cancelled in mid-stream",
    ],
)
def test_what_stays_with_the_local_model(error: Exception, stays: bool) -> None:
    """A prompt that was taken back goes nowhere."""
    assert is_refusal(error) is stays
