"""
The models that a client has LiteLLM fall back to, and what it may say of each.

LiteLLM takes an object in such a list for arguments of its call, without a look: what a
body must not say would come in there, who asks among it.
"""

from litellm_mlx import conversation_size
from litellm_mlx.head_fields import is_model_name, is_seconds

MAX_FALLBACKS = 8
_MAX_TOKENS = 1 << 24
_NUMBERS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed")
ALLOWED = ("model", "messages", "timeout", *_NUMBERS)


def are_fallbacks(value: object) -> bool:
    """Whether a value is a list of names, of objects with one, or of names by model."""
    if not isinstance(value, list) or len(value) > MAX_FALLBACKS:
        return False
    return all(_is_fallback(item) or _is_by_model(item) for item in value)


def _is_fallback(value: object) -> bool:
    if not isinstance(value, dict) or "model" not in value:
        return is_model_name(value)
    return all(_may_say(name, said) for name, said in value.items())


def _is_by_model(value: object) -> bool:
    """`{"a": ["b", "c"]}`, as configurations have it."""
    if not isinstance(value, dict) or "model" in value:
        return False
    return len(value) <= MAX_FALLBACKS and all(
        is_model_name(name)
        and isinstance(models, list)
        and len(models) <= MAX_FALLBACKS
        and all(map(_is_fallback, models))
        for name, models in value.items()
    )


def _may_say(name: str, said: object) -> bool:
    if name == "model":
        return is_model_name(said)
    if name == "messages":
        is_list = isinstance(said, list) and all(isinstance(m, dict) for m in said)
        return is_list and conversation_size.fits(said)
    if name == "timeout":
        return is_seconds(said)
    return name in _NUMBERS and type(said) in (int, float) and abs(said) <= _MAX_TOKENS  # type: ignore[arg-type]
