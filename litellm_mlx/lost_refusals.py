"""
Refusals of LiteLLM's own that are lost on their way out, sent after all.

What only an administrator may set it refuses with a ValueError, and then fails for want
of a database client while it reports that: the client is answered 500. So it is, with a
traceback, where LiteLLM knows no way to ask a provider of ours at all, and where it
would make or look up a key and has no database.
"""

import re
from collections.abc import Iterator

from litellm_mlx import answers
from litellm_mlx.access import is_model_route
from litellm_mlx.asgi import App, Message, Receive, Scope, Send
from litellm_mlx.refusals import answer

_MIN_ERROR = 400
_REFUSED = "Rejected Request: "  # how LiteLLM begins it
_UNSERVED = re.compile(
    rb"'mlx' is not a valid LlmProviders|MlxException - Not implemented yet!"
    rb"|is not supported for mlx"
)


_NO_DATABASE = (
    "LiteLLM has no database here, which virtual keys, users and spending need: set "
    "DATABASE_URL and install its client (docs/security.md, Virtual keys)"
)


def is_unserved(body: bytes) -> bool:
    """Whether LiteLLM says that it knows no way to ask a provider of ours."""
    return _UNSERVED.search(body) is not None


async def run(app: App, scope: Scope, receive: Receive, send: Send, path: str) -> None:
    """
    Run an app; answer 400 where its failure began with such a refusal, 501 where it
    was of a route that no local model serves, or that needs a database.

    Args:
        path: that was asked.
    """
    buffered = _BufferedAnswer(send, path)
    try:
        await app(scope, receive, buffered.send)
    except Exception as error:
        refused = _refusal(error)
        if refused is not None and not buffered.is_begun:
            await answer(send, path, 400, refused, refused.partition(" ")[0])
            return
        is_managing = not (buffered.is_begun or is_model_route(path))
        if is_managing and _needs_database(error):
            await answer(send, path, 501, _NO_DATABASE)
            return
        if not buffered.is_unserved:
            await buffered.release()
            raise
    if buffered.is_unserved:
        await answer(send, path, 501, f"a local model does not serve {path}", "model")
        return
    await buffered.release()


class _BufferedAnswer:
    """An answer on its way out; an error is held back until all of it is known."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self._is_chat = path.endswith("/chat/completions")
        self._held: list[Message] = []
        self.is_begun = False

    async def send(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if self._held or (is_start and message["status"] >= _MIN_ERROR):
            self._held.append(message)
            return
        self.is_begun = True
        if self._is_chat and message["type"] == "http.response.body":
            message = {
                **message,
                "body": answers.without_choice(message.get("body", b"")),
            }
        await self._send(message)

    @property
    def is_unserved(self) -> bool:
        """Whether what is held back says that there is no such route."""
        return bool(self._held) and is_unserved(answers.whole(self._held))

    async def release(self) -> None:
        held, self._held = self._held, []
        for message in answers.put_right(self._path, held) if held else ():
            await self._send(message)


def _refusal(error: BaseException) -> str | None:
    """LiteLLM's own refusal, if that is what an error began with."""
    for one in _chain(error):
        if isinstance(one, ValueError) and str(one).startswith(_REFUSED):
            return str(one).removeprefix(_REFUSED)
    return None


def _needs_database(error: BaseException) -> bool:
    """Whether LiteLLM failed for want of the client of its database."""
    return any(
        isinstance(one, ModuleNotFoundError) and one.name == "prisma"
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
