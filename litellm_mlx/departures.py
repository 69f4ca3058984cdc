"""
What is to be done when the client of a request leaves before its answer is whole.

LiteLLM's own transport serves the routes whose bodies it sends on as they are, and does
not always let go: it leaves the answer of `/v1/responses` open until that is collected
as garbage, and the model computes it to its end. Whoever starts such a call says here
what stops it, and the gate in front of LiteLLM, which sees every client come and go,
has it done.
"""

from collections.abc import Callable
from contextvars import ContextVar

from litellm_mlx.asgi import App, Message, Receive, Scope, Send

# Tasks that LiteLLM starts for a request have a copy of the context, so the same list.
_acts: ContextVar[list[Callable[[], object]] | None] = ContextVar(
    "litellm_mlx_departures", default=None
)


def when_client_leaves(act: Callable[[], object]) -> None:
    """Have this done, on the event loop, if the client leaves; no effect in the SDK."""
    acts = _acts.get()
    if acts is not None:
        acts.append(act)


class WatchedRequest:
    """
    One request on its way through an ASGI app.

    Acts once the app has ended: before, LiteLLM would take an answer that was stopped
    for one that failed, and ask another deployment.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_whole = False
        self._has_left = False

    async def run(self, app: App, scope: Scope) -> None:
        """Run the app; if the client has left, do what is to be done then."""
        acts: list[Callable[[], object]] = []
        token = _acts.set(acts)
        try:
            await app(scope, self._receiving, self._sending)
        finally:
            _acts.reset(token)
            if self._has_left or not self._is_whole:
                for act in acts:
                    act()

    async def _receiving(self) -> Message:
        message = await self._receive()
        # After the answer every client is said to have left.
        if message["type"] == "http.disconnect" and not self._is_whole:
            self._has_left = True
        return message

    async def _sending(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)
