"""
Refuses bodies that LiteLLM would answer with 500, naming the field.

It stands between the gate and LiteLLM's app, so only who may come in is read.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import orjson

from litellm_mlx.admission import Refusal
from litellm_mlx.asgi import App, Message, Receive, Scope, Send
from litellm_mlx.body_types import FieldType, types_for, wrong_type
from litellm_mlx.refusals import answer

_FAILED = 500
# How LiteLLM begins its refusal of what only an administrator may set. It is lost on
# its way out where no database client is installed, and 500 is answered.
_REFUSED = "Rejected Request: "


class BodyGate:
    """An ASGI app before another that reads JSON bodies."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer which field is wrong."""
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        types = types_for(path)
        is_read = scope["type"] == "http" and scope["method"] == "POST"
        if types is None or not is_read or _is_form(scope):
            await self._app(scope, receive, send)
            return
        messages = await _read(receive)
        # Nothing that was parsed outlives this: LiteLLM parses it for itself.
        why = _wrong(messages, types)
        if why is not None:
            await answer(send, path, why)
            return
        await self._ask(scope, _again(messages, receive), (send, path))

    async def _ask(self, scope: Scope, receive: Receive, to: tuple[Send, str]) -> None:
        send, path = to
        told = _Told(send)
        try:
            await self._app(scope, receive, told.send)
        except Exception as error:
            refused = _refusal(error)
            if refused is None or told.is_begun:
                await told.release()
                raise
            await answer(send, path, refused)
            return
        await told.release()


class _Told:
    """An answer on its way out; a failure is held back until it is known why."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []
        self.is_begun = False

    async def send(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if self._held or (is_start and message["status"] == _FAILED):
            self._held.append(message)
            return
        self.is_begun = True
        await self._send(message)

    async def release(self) -> None:
        held, self._held = self._held, []
        for message in held:
            await self._send(message)


async def _read(receive: Receive) -> deque[Message]:
    """The messages of a whole body, or up to the client's leaving."""
    messages = deque([await receive()])
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _again(messages: deque[Message], receive: Receive) -> Receive:
    """What was read, once more; then what comes."""

    async def again() -> Message:
        return messages.popleft() if messages else await receive()

    return again


def _wrong(
    messages: Iterable[Message], types: Mapping[str, FieldType]
) -> Refusal | None:
    try:
        body = orjson.loads(b"".join(m.get("body", b"") for m in messages))
    except orjson.JSONDecodeError:
        return None  # LiteLLM says so itself
    found = wrong_type(body, types)
    if found is None:
        return None
    return Refusal("invalid_request", found.message, found.param)


def _is_form(scope: Scope) -> bool:
    kinds = [v for name, v in scope["headers"] if name.lower() == b"content-type"]
    return any(b"form" in kind for kind in kinds)


def _refusal(error: BaseException | None) -> Refusal | None:
    """LiteLLM's own refusal, if that is what an error began with."""
    while error is not None:
        text = str(error)
        if isinstance(error, ValueError) and text.startswith(_REFUSED):
            said = text.removeprefix(_REFUSED)
            return Refusal("invalid_request", said, said.partition(" ")[0])
        error = error.__cause__ or error.__context__
    return None
