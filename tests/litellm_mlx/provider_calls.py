"""Calls as LiteLLM makes them, without LiteLLM."""

import json
from typing import Any

from litellm_mlx.settings import Settings
from litellm_mlx.translate import SidecarCall, chat_call
from tests.litellm_mlx.sidecar_answers import Json

SETTINGS = Settings(api_key="k", request_timeout_s=1200)


def call_with(
    params: Json | None = None, litellm_params: Json | None = None, **call: Any
) -> SidecarCall:
    base = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "optional_params": params or {},
        "litellm_params": litellm_params or {},
    }
    return chat_call({**base, **call}, SETTINGS, stream=call.get("stream", True))


def body_with(*args: Any, **call: Any) -> Json:
    return json.loads(call_with(*args, **call).content)


def proxied(url: str, body: Json, **headers: str) -> Json:
    """LiteLLM's parameters for a request that came through the proxy."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    kept = {"url": f"http://p{url}", "headers": named, "body": body}
    return {"proxy_server_request": kept}
