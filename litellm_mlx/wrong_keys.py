"""
Answers to wrong keys are delayed, and bounded in number for each address.

Each answer of 401 to a key waits a while, and few of them wait at once for one address:
beyond those nobody there is heard, a right key that is new there no sooner than a
wrong one. Who was let in from there before still is: somebody who guesses on the same
machine keeps no client out. Who has a wrong key by mistake asks one by one.
"""

import asyncio
import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass

from litellm_mlx.asgi import Message, Send

WAIT_S = 0.5
MAX_WAITING = 8
_MAX_KNOWN = 1024
_POLICY_VIOLATION = 1008  # RFC 6455: how a web socket is refused


@dataclass(frozen=True, slots=True)
class Caller:
    """
    Who asks.

    Args:
        key: the key that came with the request, empty if none did.
    """

    address: str
    key: str

    @property
    def digest(self) -> bytes:
        """Address and key as what is kept of them; not the key."""
        return hashlib.sha256(f"{self.address} {self.key}".encode()).digest()


class WrongKeys:
    """The wrong keys whose answers wait, by the address they came from."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def are_too_many(self, caller: Caller) -> bool:
        """Whether a caller's address has so many that the caller is not heard."""
        if self._waiting[caller.address] < MAX_WAITING:
            return False
        return caller.digest not in self._known

    async def wait(self) -> None:
        """
        Keep one waiting who is not heard, as long as a wrong key's answer waits.

        Answered at once it would tell a guesser that no client here has that key.
        """
        await asyncio.sleep(WAIT_S)

    def slowed(self, caller: Caller, send: Send, *, is_keyed: bool) -> Send:
        """
        The same, but a refused key's answer waits.

        Args:
            is_keyed: whether only who has a key is answered with 200 there.
        """

        async def slow(message: Message) -> None:
            if _is_refused(message):
                self._known.pop(caller.digest, None)
                await self._wait(caller.address)
            elif is_keyed and _is_served(message):
                self._remember(caller)
            await send(message)

        return slow

    def _remember(self, caller: Caller) -> None:
        self._known[caller.digest] = None
        self._known.move_to_end(caller.digest)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

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


def _is_served(message: Message) -> bool:
    return bool(message["type"] == "http.response.start" and message["status"] == 200)
