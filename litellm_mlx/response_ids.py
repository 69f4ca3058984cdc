"""
Ids of stored responses: only those that a deployment of this proxy gave.

LiteLLM writes a deployment and its provider into each id, and believes what it reads
there: with another provider's name in it, or with none, a request would go to that
provider's cloud on the key that this machine's user has for it.
"""

import re
import sys
from typing import Any

import litellm
from litellm.responses.utils import ResponsesAPIRequestUtils

_SERVER = "litellm.proxy.proxy_server"
_PATH = re.compile(
    r"(?:/openai)?(?:/v1)?/responses/(?P<id>.+?)(?:/(?:cancel|input_items))?"
)
_NO_IDS = ("compact", "input_tokens")  # ways of asking that bear no id
_POLLED = "litellm_poll_"  # kept by LiteLLM itself


def is_forged(path: str) -> bool:
    """Whether a path names a response that no deployment here can have given."""
    match = _PATH.fullmatch(path.rstrip("/"))
    if match is None or match["id"] in _NO_IDS or match["id"].startswith(_POLLED):
        return False
    decoded = ResponsesAPIRequestUtils.decode_responses_api_response_id(match["id"])
    provider = _provider_of(decoded.get("model_id"))
    return provider is None or provider != decoded.get("custom_llm_provider")


def _provider_of(model_id: str | None) -> str | None:
    """The provider of a deployment; None: there is no such deployment."""
    router: Any = getattr(sys.modules.get(_SERVER), "llm_router", None)
    found = router.get_deployment(model_id=model_id) if router and model_id else None
    if found is None:
        return None
    params = found.litellm_params
    if params.custom_llm_provider:
        return str(params.custom_llm_provider)
    return str(litellm.get_llm_provider(params.model)[1])
