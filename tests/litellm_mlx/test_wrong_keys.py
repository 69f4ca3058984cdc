"""Wrong keys at the gate: each waits, and of many none is heard."""

import asyncio
import time
from typing import Any

from litellm_mlx.access import AdmissionPolicy
from litellm_mlx.proxy_gate import ProxyGate
from litellm_mlx.settings import Settings
from litellm_mlx.wrong_keys import MAX_WAITING, WAIT_S

KEY = "sk-mine"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """What is behind the gate; with a database it knows keys of its own."""
    del receive
    status = (
        401 if (b"authorization", b"Bearer sk-unknown") in scope["headers"] else 200
    )
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def status_of(
    gate: ProxyGate, key: str, address: str = "10.0.0.7", path: str = "/x"
) -> int:
    """What a request with this key is answered."""
    told: list[Any] = []

    bodies = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if bodies:
            return bodies.pop()
        return await asyncio.Event().wait()  # until the answer ends

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "path": path, "headers": headers, "client": (address, 1)}
    await gate(scope, receive, send)
    return int(told[0]["status"])


def gate_with(policy: AdmissionPolicy) -> ProxyGate:
    return ProxyGate(app, lambda: policy, Settings())


def test_a_wrong_key_waits_and_a_right_one_does_not() -> None:
    """Whoever refuses it: the gate, or LiteLLM, which has keys in a database."""

    async def play(policy: AdmissionPolicy, wrong: str) -> list[float]:
        gate, seconds = gate_with(policy), []
        for key, status in ((wrong, 401), (KEY, 200)):
            begun = time.monotonic()
            assert await status_of(gate, key) == status
            seconds.append(time.monotonic() - begun)
        return seconds

    for policy in (AdmissionPolicy(KEY), AdmissionPolicy(KEY, has_other_keys=True)):
        slow, _ = asyncio.run(play(policy, "sk-unknown"))
        assert slow >= WAIT_S * 0.9


def test_of_many_guesses_at_once_max_are_not_heard() -> None:
    """The right key among them neither, else it could be found by trying all."""

    async def play() -> tuple[list[int], int, int]:
        gate = gate_with(AdmissionPolicy(KEY))
        keys = [f"sk-{n}" for n in range(3 * MAX_WAITING)] + [KEY]
        guesses = asyncio.gather(*(status_of(gate, key) for key in keys))
        await asyncio.sleep(0)
        elsewhere = await status_of(gate, KEY, "10.0.0.8")
        return await guesses, elsewhere, await status_of(gate, KEY)

    guesses, elsewhere, later = asyncio.run(play())
    assert guesses.count(401) == MAX_WAITING
    assert guesses.count(429) == len(guesses) - MAX_WAITING
    assert (elsewhere, later) == (200, 200)


def test_who_was_let_in_before_is_heard_beside_many_guesses() -> None:
    """On a route that asks for a key: an open one would let every guess be known."""

    async def play(path: str) -> int:
        gate = gate_with(AdmissionPolicy(KEY))
        assert await status_of(gate, KEY, path=path) == 200
        keys = [f"sk-{n}" for n in range(2 * MAX_WAITING)]
        guesses = [asyncio.create_task(status_of(gate, key)) for key in keys]
        await asyncio.sleep(0)
        heard = await status_of(gate, KEY)
        await asyncio.gather(*guesses)
        return heard

    assert asyncio.run(play("/v1/models")) == 200
    assert asyncio.run(play("/health/liveliness")) == 429
