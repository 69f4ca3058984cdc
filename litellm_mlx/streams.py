"""
Opens a streamed call before LiteLLM takes it for a success.

LiteLLM runs `astreaming` in an executor thread and takes what it returns for success.
A refusal that shows only at the first chunk comes too late for retries, for another
deployment and for `context_window_fallbacks`. So the call is opened at once, while
LiteLLM waits. The wait is capped in time and in threads: the executor is small and
shared by all requests. Whoever finds no place opens lazily, at the first chunk.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping

import httpx
from litellm.types.utils import ModelResponseStream

from litellm_mlx import client, errors
from litellm_mlx.chunks import ChunkParser, Item
from litellm_mlx.translate import SidecarCall

EAGER_WAIT_S = 2.0
# Half of the threads of asyncio's default executor.
EAGER_PLACES = min(32, (os.cpu_count() or 1) + 4) // 2

_places = threading.BoundedSemaphore(EAGER_PLACES)


def open_async(
    call: SidecarCall, loop: asyncio.AbstractEventLoop | None
) -> "AsyncChunks":
    """
    Start a streamed call, from any thread; waits a short time for the verdict.

    Args:
        loop: the loop that will read the chunks, None if unknown.
    Raises:
        The litellm exception for a refusal that came in time.
    """
    chunks = AsyncChunks(call)
    if loop is None or _is_running_here() or not _places.acquire(blocking=False):
        return chunks
    try:
        chunks.open_early(loop, EAGER_WAIT_S)
    finally:
        _places.release()
    return chunks


def open_sync(call: SidecarCall) -> Iterator[ModelResponseStream]:
    """Start a streamed call and wait for the sidecar's verdict, for sync callers."""
    return _sync_chunks(call, client.send_sync(call, stream=True))


class AsyncChunks:
    """
    The chunks of one answer; releases the call when over, closed, failed or dropped.

    Not a generator: one that was never started runs no `finally` when it is dropped,
    which is what happens if the client leaves during the eager wait.
    """

    def __init__(self, call: SidecarCall) -> None:
        self._model = call.model
        self._opening = _PendingCall(call)
        self._early: concurrent.futures.Future[httpx.Response] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._parser = ChunkParser(call)
        self._ready: deque[Item] = deque()
        self._pieces: AsyncIterator[bytes] | None = None
        self._is_released = False

    def open_early(self, loop: asyncio.AbstractEventLoop, wait_s: float) -> None:
        """Send the call on its loop, from another thread; raises what comes in time."""
        self._loop = loop
        self._early = asyncio.run_coroutine_threadsafe(self._opening.run(), loop)
        concurrent.futures.wait([self._early], timeout=wait_s)
        if self._early.done():
            self._early.result()

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer; none where it was not there at once."""
        early = self._early
        return early.result().headers if early is not None and early.done() else {}

    def __aiter__(self) -> "AsyncChunks":
        return self

    async def __anext__(self) -> ModelResponseStream:
        """Return the next chunk; raises a litellm exception if the answer broke."""
        if self._is_released:
            raise StopAsyncIteration
        try:
            while not self._ready:
                await self._read_more()
            item = self._ready.popleft()
            if isinstance(item, Exception):
                raise item
            if item is None:
                raise StopAsyncIteration
        except BaseException:
            await self.aclose()
            raise
        return item

    async def aclose(self) -> None:
        """Close the answer; cancel the call unless the sidecar ended it. Repeatable."""
        if not self._is_released:
            self._is_released = True
            await self._opening.drop(cancel=not self._parser.is_over)

    def __del__(self) -> None:
        """Release a call that LiteLLM dropped; garbage is collected on any thread."""
        if self._is_released or self._loop is None or self._loop.is_closed():
            return
        drop = self._opening.drop
        self._loop.call_soon_threadsafe(lambda: client.in_background(drop(cancel=True)))

    async def _read_more(self) -> None:
        if self._pieces is None:
            self._loop = asyncio.get_running_loop()
            response = await self._opened()
            self._pieces = response.aiter_bytes()
        reading = asyncio.ensure_future(_next_of(self._pieces))
        try:
            piece = await client.finished(reading)
        except httpx.HTTPError as exc:
            raise errors.from_transport(exc, self._model, started=True) from exc
        parser = self._parser
        self._ready += parser.end() if piece is None else parser.feed(piece)

    async def _opened(self) -> httpx.Response:
        if self._early is None:
            return await self._opening.run()
        return await asyncio.wrap_future(self._early)


class _PendingCall:
    """
    A call on its way and the answer once it is there.

    Runs and is dropped on the event loop only, so no answer slips through between the
    two. Holds no `AsyncChunks`: those must become garbage while it still waits.
    """

    def __init__(self, call: SidecarCall) -> None:
        self._call = call
        self._opened: client.Exchange | None = None
        self._task: asyncio.Task[object] | None = None

    async def run(self) -> httpx.Response:
        self._task = asyncio.current_task()
        exchange = client.Exchange(self._call)
        try:
            response = await exchange.open(stream=True)
        finally:
            self._task = None
        self._opened = exchange
        return response

    async def drop(self, *, cancel: bool) -> None:
        if self._opened is not None:
            await self._opened.release(cancel=cancel)
        elif self._task is not None:
            self._task.cancel()  # the exchange then cancels the call at the sidecar


async def _next_of(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)


def _sync_chunks(
    call: SidecarCall, response: httpx.Response
) -> Iterator[ModelResponseStream]:
    parser = ChunkParser(call)
    try:
        for item in _sync_items(parser, response, call.model):
            if isinstance(item, Exception):
                raise item
            if item is None:
                return
            yield item
    finally:
        response.close()
        if not parser.is_over:
            client.cancel_sync(call)


def _sync_items(
    parser: ChunkParser, response: httpx.Response, model: str
) -> Iterator[Item]:
    try:
        for piece in response.iter_bytes():
            yield from parser.feed(piece)
    except httpx.HTTPError as exc:
        raise errors.from_transport(exc, model, started=True) from exc
    yield from parser.end()


def _is_running_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True  # waiting here would stop the loop that is waited for
