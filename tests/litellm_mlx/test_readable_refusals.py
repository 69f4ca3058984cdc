"""Refusals of the gate to a page of CORS_ALLOW_ORIGINS, which is to read them."""

import asyncio
from typing import Any

import pytest

from litellm_mlx.access import AdmissionPolicy
from litellm_mlx.proxy_gate import ProxyGate
from litellm_mlx.settings import Settings

KEY, PAGE = "sk-mine", "http://page.example"
LETS_IN = (b"access-control-allow-origin", PAGE.encode())


async def app(scope: Any, receive: Any, send: Any) -> None:
    """LiteLLM: what it answers itself, any page may read."""
    del scope, receive
    headers = [(b"access-control-allow-origin", b"*")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


def head_of(origin: str, key: str, body: bytes = b"") -> Any:
    """The answer's status and headers to a page that asks with a key."""
    told: list[Any] = []
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        told.append(message)

    policy = AdmissionPolicy(KEY, origins=(PAGE,))
    gate = ProxyGate(app, lambda: policy, Settings())
    sent = {
        "host": "127.0.0.1", "origin": origin, "authorization": f"Bearer {key}",
        "content-type": "application/json",
    }  # fmt: skip
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions",
        "headers": [(n.encode(), v.encode()) for n, v in sent.items()],
        "client": ("10.0.0.7", 1),
    }  # fmt: skip
    asyncio.run(gate(scope, receive, send))
    return told[0]


@pytest.mark.parametrize(
    ("key", "body", "status"), [("sk-wrong", b"{}", 401), (KEY, b"{", 400)]
)
def test_a_page_that_is_let_in_reads_why_not(
    key: str, body: bytes, status: int
) -> None:
    """A browser tells it nothing of an answer without this header."""
    head = head_of(PAGE, key, body)
    assert head["status"] == status
    assert LETS_IN in head["headers"]
    exposed = (b"access-control-expose-headers", b"Retry-After, X-Request-ID")
    assert exposed in head["headers"]
    assert (b"vary", b"Origin") in head["headers"]


def test_what_litellm_said_of_its_own_stays() -> None:
    """One header, not two: a browser takes no answer with both."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    head = head_of(PAGE, KEY, body)
    names = [name for name, _ in head["headers"]]
    assert head["status"] == 200
    assert names.count(b"access-control-allow-origin") == 1


def test_a_page_of_the_network_may_ask_whether_it_may_come() -> None:
    """Its browser asks so; LiteLLM answers 400 to a preflight that does."""
    seen: list[Any] = []

    async def litellm(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(name for name, _ in scope["headers"])
        await app(scope, receive, send)

    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    gate = ProxyGate(litellm, lambda: AdmissionPolicy(KEY, origins=(PAGE,)), Settings())
    headers = [
        (b"host", b"127.0.0.1"), (b"origin", PAGE.encode()),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-private-network", b"true"),
    ]  # fmt: skip
    scope = {
        "type": "http", "method": "OPTIONS", "path": "/v1/chat/completions",
        "headers": headers, "client": ("10.0.0.7", 1),
    }  # fmt: skip
    asyncio.run(gate(scope, receive, send))
    assert (b"access-control-allow-private-network", b"true") in told[0]["headers"]
    assert b"access-control-request-private-network" not in seen


def test_another_page_reads_nothing() -> None:
    head = head_of("http://evil.example", KEY)
    assert head["status"] == 403
    names = {name for name, _ in head["headers"]}
    assert b"access-control-allow-origin" not in names
