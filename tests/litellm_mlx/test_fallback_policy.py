"""Which failures of a local model another one may answer."""

import litellm
import pytest

from litellm_mlx.errors import PROVIDER
from litellm_mlx.fallback_policy import is_refusal


def failure(status: int, text: str) -> Exception:
    """What LiteLLM's router is told of a call to the sidecar."""
    return litellm.APIError(status, text, PROVIDER, "mlx/local")


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (failure(400, "stop must be a string"), True),
        (failure(503, "the model is still loading"), False),
        (failure(400, "context_length_exceeded"), False),
        (failure(499, '{"code": "request_cancelled"}'), True),
        # Before the first text LiteLLM makes another error of it, of another status.
        (
            litellm.ServiceUnavailableError(
                "MidStreamFallbackError: the request was cancelled", PROVIDER, "local"
            ),
            True,
        ),
    ],
    ids=["refused", "loading", "too long", "cancelled", "cancelled in mid-stream"],
)
def test_what_stays_with_the_local_model(error: Exception, stays: bool) -> None:
    """A prompt that was taken back goes nowhere."""
    assert is_refusal(error) is stays
