"""
What must happen before LiteLLM calls the provider.

LiteLLM refuses (or, with `drop_params`, deletes) parameters that its list for
custom providers lacks, `reasoning_effort` among them. The hook allows them, so no
configuration has to. It runs on the event loop, the provider's `astreaming` in an
executor thread: the hook leaves the loop behind for it in a context variable.

LiteLLM runs it for async calls only. Sync SDK callers name such parameters in
`allowed_openai_params`, or send them in `extra_body`.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

import litellm
from litellm.integrations.custom_logger import CustomLogger

PROVIDER = "mlx"

ALLOWED_PARAMS = (
    # Refused unless allowed:
    "reasoning_effort",
    "thinking",
    "verbosity",
    "context_management",
    "include_server_side_tool_invocations",
    "response_format",  # refused for models that are named like gpt-4
    # Dropped without a word unless allowed:
    "user",
    "prompt_cache_retention",
)
# Refused for embeddings whatever is allowed; the openai client always sends one.
_EMBEDDING_PARAMS = ("dimensions", "encoding_format", "user")

_calling_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar(
    "litellm_mlx_calling_loop", default=None
)


def calling_loop() -> asyncio.AbstractEventLoop | None:
    """The loop this request came in on, None where the hook did not run."""
    return _calling_loop.get()


class MLXDeploymentHook(CustomLogger):  # type: ignore[misc]  # litellm is untyped
    """Lets all parameters through to `mlx/` deployments; touches no other request."""

    async def async_pre_call_deployment_hook(
        self, kwargs: dict[str, object], call_type: object
    ) -> dict[str, object] | None:
        """Return the request with its allow-list widened, None to leave it alone."""
        if not _is_ours(kwargs):
            return None
        _calling_loop.set(asyncio.get_running_loop())
        if "embedding" in str(getattr(call_type, "value", call_type)):
            return _with_hidden_params(kwargs)
        return _with_allowed_params(kwargs)


def _with_allowed_params(kwargs: dict[str, object]) -> dict[str, object]:
    given = kwargs.get("allowed_openai_params")
    allowed = list(given) if isinstance(given, Iterable) else []
    missing = [name for name in ALLOWED_PARAMS if name not in allowed]
    return {**kwargs, "allowed_openai_params": allowed + missing}


def _with_hidden_params(kwargs: dict[str, object]) -> dict[str, object]:
    # LiteLLM does not look into extra_body, and the provider flattens it.
    hidden = {k: kwargs[k] for k in _EMBEDDING_PARAMS if kwargs.get(k) is not None}
    given = kwargs.get("extra_body")
    extra = {**given, **hidden} if isinstance(given, Mapping) else hidden
    kept = {k: v for k, v in kwargs.items() if k not in _EMBEDDING_PARAMS}
    return {**kept, "extra_body": extra} if extra else kept


def _is_ours(kwargs: dict[str, object]) -> bool:
    if kwargs.get("custom_llm_provider") == PROVIDER:
        return True
    return str(kwargs.get("model", "")).startswith(f"{PROVIDER}/")


def register() -> None:
    """Make LiteLLM run the hook. Doing it twice does no harm."""
    registered = (isinstance(entry, MLXDeploymentHook) for entry in litellm.callbacks)
    if not any(registered):
        litellm.logging_callback_manager.add_litellm_callback(MLXDeploymentHook())
