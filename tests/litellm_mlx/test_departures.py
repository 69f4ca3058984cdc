"""Clients that leave, as the gate in front of LiteLLM sees them: ASGI by hand."""

import asyncio

import pytest

from litellm_mlx.departures import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    WatchedRequest,
    when_client_leaves,
)

GONE: Message = {"type": "http.disconnect"}
PART: Message = {"type": "http.response.body", "body": b"a", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"b"}


def acts_of(app: App) -> list[str]:
    """What was done for the client of one request."""
    done: list[str] = []

    async def asking(scope: Scope, receive: Receive, send: Send) -> None:
        # As LiteLLM does: a task of the request's, with a copy of its context.
        await asyncio.create_task(start(done))
        await app(scope, receive, send)
        assert not done

    async def receive() -> Message:
        return GONE

    async def send(_message: Message) -> None:
        pass

    asyncio.run(WatchedRequest(receive, send).run(asking, {"type": "http"}))
    return done


async def start(done: list[str]) -> None:
    when_client_leaves(lambda: done.append("first"))
    when_client_leaves(lambda: done.append("again"))


class TestWatchedRequest:
    def test_a_client_that_leaves_a_stream(self) -> None:
        """All that was started for it is stopped, once the app has ended."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(PART)
            await receive()

        assert acts_of(app) == ["first", "again"]

    def test_an_error_that_nobody_hears(self) -> None:
        """LiteLLM answers a client that has left with 499."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await send(LAST)

        assert acts_of(app) == ["first", "again"]

    def test_an_app_that_just_ends(self) -> None:
        """Who writes to a closed connection may be told nothing of it."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(PART)

        assert acts_of(app) == ["first", "again"]

    def test_a_whole_answer(self) -> None:
        """After it the server says of every client that it has left."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(PART)
            await send(LAST)
            await receive()

        assert acts_of(app) == []

    def test_an_app_that_fails(self) -> None:
        """What it has started is stopped, and its error goes on."""
        done: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await start(done)
            raise LookupError

        async def never() -> Message:
            raise AssertionError

        async def send(_message: Message) -> None:
            raise AssertionError

        with pytest.raises(LookupError):
            asyncio.run(WatchedRequest(never, send).run(app, {"type": "http"}))
        assert done == ["first", "again"]


def test_without_a_gate() -> None:
    """In the SDK there is no client that could leave."""
    done: list[str] = []
    asyncio.run(start(done))
    assert done == []
