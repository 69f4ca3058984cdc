"""Sockets that a client opens to LiteLLM's app: which of them the gate lets through."""

import asyncio
from typing import Any

import pytest

from litellm_mlx.access import AdmissionPolicy
from litellm_mlx.proxy_gate import ProxyGate
from litellm_mlx.settings import Settings

KEY = "sk-mine"


@pytest.mark.parametrize(
    ("path", "key", "origin", "comes_in"),
    [
        ("/v1/realtime", KEY, None, True),
        ("/v1/realtime", "sk-other", None, False),
        ("/v1/realtime", KEY, b"https://evil.example", False),
        ("/v1/responses", KEY, None, False),
        ("/responses", KEY, None, False),
    ],
)
def test_no_socket_on_a_models_route(
    path: str, key: str, origin: bytes | None, comes_in: bool
) -> None:
    """What comes over it nobody has checked: a body is, before LiteLLM sees it."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive, send
        seen.append(scope["path"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        seen.append(message["type"])

    headers = [
        (b"host", b"127.0.0.1:4000"),
        (b"authorization", f"Bearer {key}".encode()),
    ]
    headers += [(b"origin", origin)] if origin else []
    scope = {"type": "websocket", "path": path, "headers": headers}
    gate = ProxyGate(app, lambda: AdmissionPolicy(KEY), Settings())
    asyncio.run(gate(scope, receive, send))
    assert seen == ([path] if comes_in else ["websocket.close"])
