"""
What the head of a request tells LiteLLM besides its body: a model's name, and headers.

LiteLLM takes a model's name from the path and the query as well as from the body, and
looks through a long one for secrets, on the thread that serves everybody: 60 kB hold it
for 12 s. Names in one string, between commas, it asks one after the other. Its own
headers say how long it waits and how often it tries again; what it cannot read in them
is a 500.
"""

import math
import re
from collections.abc import Mapping, Sequence

from litellm_mlx.control_fields import MAX_TAGS, RETRIES_HEADER, retries_fault

MODEL_NAME_LEN = 512
_SECONDS_HEADERS = (
    "x-litellm-timeout", "x-litellm-stream-timeout", "x-litellm-keepalive-seconds",
)  # fmt: skip
_MAX_S = 86_400.0
_MAX_HEADERS = 64  # for a provider: LiteLLM compares each with all others
_TAGS_HEADER = "x-litellm-tags"
# With another's key, or for another address, a cloud answers 401: LiteLLM then shuts
# the deployment out for everybody.
_NOT_FOR_CLIENTS = re.compile(
    r"auth|key|token|cookie|secret|signature|credential|organization|project|tenant"
    r"|^(?:host|connection|upgrade|te|trailer|expect|content-.*|transfer-.*|proxy-.*)$"
    r"|^x-(?:amz|ms|goog|forwarded|original|http-method)-",
    re.IGNORECASE,
)
_FOR_CLIENTS = ("idempotency-key",)
# A name may be in the path of these, with slashes in it.
_NAMED_IN_PATH = re.compile(
    r"(?:/v1|/v1beta)?/models/(?P<model>.+)"
    r"|/(?:engines|openai/deployments)/(?P<deployment>.+?)/(?:chat/)?[a-z]+"
)


def is_model_name(value: object) -> bool:
    """Whether a value is the name of one model, and not too long for LiteLLM."""
    return isinstance(value, str) and len(value) <= MODEL_NAME_LEN and "," not in value


def is_seconds(value: object) -> bool:
    """Whether a value is a time to wait: at a time that is over LiteLLM falls back."""
    is_number = type(value) in (int, float)
    return is_number and math.isfinite(value) and 0 < value <= _MAX_S  # type: ignore[arg-type, operator]


def headers_fit(value: object) -> bool:
    """Whether a value is headers for a provider, each of one line, none of a key."""
    if not isinstance(value, dict):
        return False
    if any(_NOT_FOR_CLIENTS.search(n) for n in value if n.lower() not in _FOR_CLIENTS):
        return False
    lines = [*value, *(v for v in value.values() if isinstance(v, str))]
    if len(value) > _MAX_HEADERS:
        return False
    are_plain = not any(isinstance(v, dict | list) for v in value.values())
    return are_plain and not any(c in line for line in lines for c in "\r\n\0")


def head_fault(
    path: str, models: Sequence[str], headers: Mapping[str, str]
) -> tuple[str, str] | None:
    """
    What is wrong with the head of a request that asks a model: the field, in words.

    Args:
        models: those that the query names. headers: by names in lower case.
    """
    found = _NAMED_IN_PATH.fullmatch(path)
    named = [name for name in (found.groups() if found else ()) if name]
    if any(len(name) > MODEL_NAME_LEN for name in named):
        return "model", f"model must be of at most {MODEL_NAME_LEN} characters"
    if not all(map(is_model_name, models)) or len(models) > 1:
        return "model", f"model must be one name of at most {MODEL_NAME_LEN} characters"
    if fault := retries_fault(headers.get(RETRIES_HEADER)):
        return RETRIES_HEADER, fault
    if headers.get(_TAGS_HEADER, "").count(",") >= MAX_TAGS:
        return _TAGS_HEADER, f"{_TAGS_HEADER} must name at most {MAX_TAGS} tags"
    for name in _SECONDS_HEADERS:
        if name in headers and not is_seconds(_number(headers[name])):
            return name, f"{name} must be a number of seconds from 0 to {_MAX_S:.0f}"
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
