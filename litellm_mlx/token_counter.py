"""
`/v1/messages/count_tokens` through LiteLLM: by the model's own tokenizer and template.

LiteLLM estimates for every provider that is not in its own list; the estimate knows
neither the template nor the tools as a model reads them. The sidecar's count is exact.
"""

import functools
import logging
import sys
from typing import Any

import httpx
from litellm.llms.base_llm.base_utils import BaseTokenCounter
from litellm.types.utils import TokenCountResponse

from litellm_mlx.errors import PROVIDER
from litellm_mlx.settings import current_settings

logger = logging.getLogger(__name__)

_SERVER = "litellm.proxy.proxy_server"
_FIND = "_get_provider_token_counter"
_TIMEOUT_S = 60.0
_TOKENIZER = "sidecar"


class SidecarTokenCounter(BaseTokenCounter):  # type: ignore[misc]  # litellm is untyped
    """Asks the sidecar; None, where it cannot say, leaves the estimate."""

    def should_use_token_counting_api(
        self, custom_llm_provider: str | None = None
    ) -> bool:
        """For our deployments only."""
        return custom_llm_provider == PROVIDER

    async def count_tokens(
        self,
        model_to_use: str,
        messages: list[dict[str, Any]] | None,
        contents: list[dict[str, Any]] | None,
        deployment: dict[str, Any] | None = None,
        request_model: str = "",
        **asked: Any,
    ) -> TokenCountResponse | None:
        """The tokens of an Anthropic conversation."""
        if not messages or asked.get("messages_format") != "anthropic":
            return None
        body = {"model": model_to_use, "messages": messages, "max_tokens": 1}
        more = {name: asked.get(name) for name in ("tools", "system")}
        body |= {name: value for name, value in more.items() if value}
        answer = await _ask((deployment or {}).get("litellm_params") or {}, body)
        if answer is None:
            return None
        if not answer.is_success:
            return TokenCountResponse(
                total_tokens=0,
                request_model=request_model,
                model_used=model_to_use,
                tokenizer_type=_TOKENIZER,
                error=True,
                error_message=_said(answer),
                status_code=answer.status_code,
            )
        return TokenCountResponse(
            total_tokens=answer.json()["input_tokens"],
            request_model=request_model,
            model_used=model_to_use,
            tokenizer_type=_TOKENIZER,
        )


async def _ask(params: dict[str, Any], body: dict[str, Any]) -> httpx.Response | None:
    """The sidecar's answer; None: it is not there."""
    settings = current_settings()
    base = str(params.get("api_base") or settings.api_base).rstrip("/")
    key = params.get("api_key") or settings.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
            url = f"{base}/messages/count_tokens"
            return await client.post(url, json=body, headers=headers)
    except httpx.HTTPError as error:
        logger.debug("the sidecar did not count: %s", error)
        return None


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def install() -> None:
    """Have LiteLLM's proxy ask; nothing outside of it. Twice does no harm."""
    server = sys.modules.get(_SERVER)
    original: Any = getattr(server, _FIND, None)
    if original is None or getattr(original, "knows_sidecar", False):
        return
    counter = SidecarTokenCounter()

    @functools.wraps(original)
    def finding(deployment: dict[str, Any], model_to_use: str) -> Any:
        params = (deployment or {}).get("litellm_params") or {}
        provider, _, model = str(params.get("model", "")).partition("/")
        if provider == PROVIDER:
            return counter, model, PROVIDER
        return original(deployment, model_to_use)

    finding.knows_sidecar = True  # type: ignore[attr-defined]
    setattr(server, _FIND, finding)
