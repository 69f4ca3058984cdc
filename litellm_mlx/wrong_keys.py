"""
Wrong keys are slowed down: who guesses learns little by each guess.

Each answer of 401 to a key waits a while, and few of them wait at once for one address:
beyond those nobody there is heard, a right key no sooner than a wrong one. Who
has a wrong key by mistake asks one by one, and keeps nobody out.
"""

import asyncio
from collections import Counter

from litellm_mlx.asgi import Message, Send

WAIT_S = 0.5
MOST_WAITING = 8
_POLICY_VIOLATION = 1008  # RFC 6455: how a web socket is refused


class WrongKeys:
    """The wrong keys whose answers wait, by the address they came from."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    def are_too_many(self, address: str) -> bool:
        """Whether an address has so many that it is not heard."""
        return self._waiting[address] >= MOST_WAITING

    def slowed(self, address: str, send: Send) -> Send:
        """The same, but a refused key's answer waits."""

        async def slow(message: Message) -> None:
            if _is_refused(message):
                await self._wait(address)
            await send(message)

        return slow

    async def _wait(self, address: str) -> None:
        self._waiting[address] += 1
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]


def _is_refused(message: Message) -> bool:
    if message["type"] == "websocket.close":
        return bool(message.get("code") == _POLICY_VIOLATION)
    return bool(message["type"] == "http.response.start" and message["status"] == 401)
