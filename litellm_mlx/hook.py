"""
Lets parameters through that LiteLLM would refuse or drop.

LiteLLM refuses (or, with `drop_params`, deletes) parameters that its list for
custom providers lacks, `reasoning_effort` among them. The hook allows them, so no
configuration has to. It runs on the event loop, the provider's `astreaming` in an
executor thread: the hook leaves the loop behind for it in a context variable.

LiteLLM runs it for async calls only. Sync SDK callers name such parameters in
`allowed_openai_params`, or send them in `extra_body`.
"""

import asyncio
import functools
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import litellm
from litellm.integrations.custom_logger import CustomLogger

from litellm_mlx import (
    chat_messages,
    client,
    departures,
    errors,
    fallback_notice,
    google_body,
    ignored_header,
    private,
    translate,
)
from litellm_mlx.errors import PROVIDER
from litellm_mlx.extra_body import with_all_stops
from litellm_mlx.json_objects import as_object
from litellm_mlx.settings import current_settings

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

# aiohttp's words for a sidecar that does not run, or that ended before it answered.
_UNREACHABLE = ("Cannot connect to host", "Server disconnected", "Connection reset by")

# Google's generateContent: LiteLLM makes a chat of it, but not for custom providers.
_GOOGLE_CALLS = ("agenerate_content", "agenerate_content_stream")
_KNOWN_PROVIDER = "hosted_vllm"  # for LiteLLM an OpenAI server with extensions

_CHAT_CALLS = ("completion", "acompletion")
# Bodies of these go to the sidecar as they are, if the deployment says so.
_NATIVE_CALLS = ("anthropic_messages", "aresponses", "responses")

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
        """
        Return the request with its allow-list widened, None to leave it alone.

        Raises:
            litellm.BadRequestError: what LiteLLM cannot make a chat of.
        """
        if not _is_ours(kwargs):
            return None
        _calling_loop.set(asyncio.get_running_loop())
        kind = str(getattr(call_type, "value", call_type))
        _check_route(kwargs)
        if kind in _GOOGLE_CALLS:
            kwargs = _as_chat_of_a_known_provider(google_body.readable(kwargs))
            return _with_client_facts(kwargs)
        if "embedding" in kind:
            return _with_hidden_params(kwargs)
        if "text_completion" in kind:
            _check_prompt(kwargs)
        messages = kwargs.get("messages")
        if kind in _CHAT_CALLS and isinstance(messages, list):
            kwargs = {**kwargs, "messages": chat_messages.readable(messages)}
            kwargs = with_all_stops(kwargs)
        if kind in _NATIVE_CALLS:
            kwargs = _with_client_facts(kwargs)
        return _with_allowed_params(kwargs)

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, object],
        original_exception: Exception,
        user_api_key_dict: object,
        traceback_str: str | None = None,
    ) -> None:
        """
        Tell what happened at the sidecar where LiteLLM sends bodies on as they are.

        There it answers 500 for a sidecar that it could not reach, as for a fault of
        its own. And tell the client when to ask again, if the sidecar said so.
        """
        error: Any = original_exception
        text = str(error)
        if getattr(error, "llm_provider", None) != PROVIDER:
            return
        if any(said in text for said in _UNREACHABLE):
            # In place: of /v1/messages LiteLLM takes no other error than its own.
            error.status_code = 503
            error.message = "the MLX sidecar is not reachable just now"
        seconds = errors.retry_after(error)
        if seconds is not None:
            error.headers = {"retry-after": seconds}

    async def async_post_call_response_headers_hook(
        self,
        data: dict[str, object],
        user_api_key_dict: object,
        response: object,
        request_headers: dict[str, str] | None = None,
    ) -> dict[str, str] | None:
        """Name to the client what it asked for in vain."""
        return ignored_header.of_answer(data, response)

    async def log_success_fallback_event(
        self,
        original_model_group: str,
        kwargs: dict[str, object],
        original_exception: Exception,
    ) -> None:
        """Say that another model answered."""
        model, error = kwargs.get("model"), original_exception
        fallback_notice.tell(model, original_model_group, error, failed=False)

    async def log_failure_fallback_event(
        self,
        original_model_group: str,
        kwargs: dict[str, object],
        original_exception: Exception,
    ) -> None:
        """Say that another model could not answer either."""
        model, error = kwargs.get("model"), original_exception
        fallback_notice.tell(model, original_model_group, error, failed=True)


def _check_route(kwargs: Mapping[str, object]) -> None:
    # LiteLLM makes a response of it, and loses calls, what was said before and the line
    # between thinking and answer.
    sent = as_object(kwargs.get("proxy_server_request")).get("url")
    if urlsplit(str(sent)).path.rstrip("/").endswith("/interactions"):
        raise litellm.BadRequestError(
            "interactions are not served by local models: ask for generateContent",
            model=str(kwargs.get("model")), llm_provider=PROVIDER,
        )  # fmt: skip


def _check_prompt(kwargs: Mapping[str, object]) -> None:
    # LiteLLM makes a chat of texts, and repeats all else in a 500, however long it is.
    prompt = kwargs.get("prompt")
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise litellm.BadRequestError(
            "prompt must be a text or a list of texts; the sidecar itself takes ids",
            model=str(kwargs.get("model")), llm_provider=PROVIDER,
        )  # fmt: skip
    if kwargs.get("stream") and kwargs.get("logprobs") is not None:
        raise litellm.BadRequestError(
            "logprobs must be left out of a stream: LiteLLM does not pass them on",
            model=str(kwargs.get("model")), llm_provider=PROVIDER,
        )  # fmt: skip


def _with_allowed_params(kwargs: dict[str, object]) -> dict[str, object]:
    given = kwargs.get("allowed_openai_params")
    allowed = list(given) if isinstance(given, Iterable) else []
    missing = [name for name in ALLOWED_PARAMS if name not in allowed]
    return {**kwargs, "allowed_openai_params": allowed + missing}


def _with_client_facts(kwargs: dict[str, object]) -> dict[str, object]:
    # What LiteLLM cuts from a body that it sends on goes into a header beside it.
    # A client's body may ask for headers too, but not for those that say who asks.
    kept: dict[str, object] = {
        name: private.without_ours(as_object(kwargs[name]))
        for name in ("headers", "extra_headers")
        if kwargs.get(name) is not None
    }
    if (specific := kwargs.get("provider_specific_header")) is not None:
        kept["provider_specific_header"] = private.without_ours_within(specific)
    settings = current_settings()
    call_id = translate.attempt_id(kwargs)
    key = translate.authorization(kwargs.get("api_key"), settings)
    url = translate.cancel_url(kwargs.get("api_base"), settings, call_id)
    departures.when_client_leaves(functools.partial(client.cancel_soon, url, key))
    # A kept connection may be closed just when LiteLLM's transport uses it again: by a
    # sidecar that is full, or that has died.
    ours = {"x-mlx": private.native_header(kwargs), "X-Request-ID": call_id,
            "Connection": "close", **key}  # fmt: skip
    return {
        **kwargs,
        **kept,
        "extra_headers": {**as_object(kept.get("extra_headers")), **ours},
    }


def _as_chat_of_a_known_provider(kwargs: dict[str, object]) -> dict[str, object]:
    name = str(kwargs.get("model", "")).removeprefix(f"{PROVIDER}/")
    sidecar = current_settings()
    return {
        **kwargs,
        "model": f"{_KNOWN_PROVIDER}/{name}",
        "custom_llm_provider": _KNOWN_PROVIDER,
        "api_base": kwargs.get("api_base") or sidecar.api_base,
        "api_key": sidecar.api_key or "none",  # a client's body may name one
    }


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
