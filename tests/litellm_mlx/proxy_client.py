"""Asking the same on each route of the proxy, and what clients make of a stream."""

from typing import Any

import httpx
import pytest

from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.sidecar_answers import Json

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ROUTES = (CHAT, MESSAGES, RESPONSES)


def body_for(route: str, model: str, *, stream: bool) -> Json:
    asked: Json = {"input": "hi"} if route == RESPONSES else {"messages": HI}
    limit = {"max_tokens": 99} if route == MESSAGES else {}
    return {"model": model, "stream": stream, **asked, **limit}


def post(proxy: Proxy, route: str, model: str, *, stream: bool) -> httpx.Response:
    return proxy.http.post(route, json=body_for(route, model, stream=stream))


def both_modes(test: Any) -> Any:
    return pytest.mark.parametrize("stream", [False, True], ids=["N", "S"])(test)


CALLS = [("call_a", "get_weather", '{"city":"Paris"}')]
CALLS += [("call_b", "get_time", '{"tz":"CET"}')]


def joined(chunks: list[Any]) -> Json:
    """What a chat client puts together from the chunks of one choice."""
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    usages = [c.usage for c in chunks if getattr(c, "usage", None)]
    return {
        "text": "".join(delta.content or "" for delta in deltas),
        "reasoning": "".join(
            getattr(delta, "reasoning_content", None) or "" for delta in deltas
        ),
        "calls": [(c.id, c.function.name, c.function.arguments) for c in calls],
        "finishes": [finish for finish in finishes if finish],
        "usage": usages[-1] if usages else None,
        "num_usages": len(usages),
    }


def assert_usage(usage: Any) -> None:
    assert (usage.prompt_tokens, usage.completion_tokens) == (100, 20)
    assert usage.prompt_tokens_details.cached_tokens == 64
    assert usage.completion_tokens_details.reasoning_tokens == 7
