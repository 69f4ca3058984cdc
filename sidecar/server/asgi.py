"""
The routes of `/v1` as an ASGI application, for a program with a server of its own.

It has no socket and no places: who mounts it bounds connections and times. The rest is
as over the sidecar's port: who may come in, the size of a body, errors, streams.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from sidecar.config.settings import ServerConfig
from sidecar.core.errors import NotFound, PayloadTooLarge, SidecarError
from sidecar.server import access
from sidecar.server.http_messages import (
    EventStream,
    Request,
    Response,
    Router,
    StreamWriter,
    problem_response,
)
from sidecar.server.request_head import request_id

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_PREFIX = "/v1"
# Nobody answers batches beside another program's server.
_NOT_HERE = re.compile(r"/v1/(batches|files)(/.*)?")
_WRITE_S = 60.0
_PLAIN = "/:@!$&'()*+,;=~"  # signs that stand in a path as they are


class AsgiApp:
    """
    Called by an ASGI server, one call a request.

    Args:
        most: requests that are answered at once; more of them wait.
    """

    def __init__(self, routes: Router, config: ServerConfig, most: int) -> None:
        self._routes, self._config = routes, config
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="asgi")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await _Exchange(self._routes, self._config, scope, receive, send).run(
                self._threads
            )
        else:
            raise ValueError(f"{scope['type']} is not served, only http")

    def close(self) -> None:
        """Take no more requests; those that run go on."""
        self._threads.shutdown(wait=False)


async def _live(receive: Receive, send: Send) -> None:
    """Nothing is done at the start and the end of a server: the model is there."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


class _Exchange:
    """One request and its answer; what computes does so on a thread."""

    def __init__(
        self,
        routes: Router,
        config: ServerConfig,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._routes, self._config = routes, config
        self._receive, self._send = receive, send
        self._scope, self._path = scope, _path_of(scope)
        self._headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self._id = request_id(self._headers.get("x-request-id", ""))
        self._is_connected, self._is_begun = True, False
        self._loop = asyncio.get_running_loop()

    async def run(self, threads: ThreadPoolExecutor) -> None:
        """Read the body, then answer until all is written or the client is gone."""
        try:
            access.check(self._config, self._scope["method"], self._path, self._headers)
            body = await self._body()
        except SidecarError as error:
            await self._loop.run_in_executor(threads, self._fail, error)
            return
        leaving = asyncio.create_task(self._watch())
        try:
            await self._loop.run_in_executor(threads, self._answer, body)
        finally:
            leaving.cancel()

    async def _body(self) -> bytes:
        limit, whole = self._config.max_body_mb << 20, bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_connected = False
                return b""
            whole += message.get("body", b"")
            if len(whole) > limit:
                size = self._config.max_body_mb
                raise PayloadTooLarge(f"the body must have at most {size} MB")
            if not message.get("more_body"):
                return bytes(whole)

    async def _watch(self) -> None:
        while self._is_connected:
            message = await self._receive()
            self._is_connected = message["type"] != "http.disconnect"

    def _answer(self, body: bytes) -> None:
        """On a thread of its own."""
        if not self._is_connected:
            return
        try:
            if not self._path.startswith(f"{_PREFIX}/") or _NOT_HERE.fullmatch(
                self._path
            ):
                raise NotFound("no such path")
            method = self._scope["method"]
            endpoint, tail = self._routes.find(
                "GET" if method == "HEAD" else method, self._path
            )
            request = Request(
                method,
                self._path,
                self._headers,
                body,
                self._id,
                tail,
                self._scope.get("query_string", b"").decode("latin-1"),
                lambda: self._is_connected,
            )
            response = endpoint(request)
            if isinstance(response, EventStream):
                self._stream(response)
            else:
                self._write(response)
        except SidecarError as error:
            self._fail(error)
        except OSError:
            self._is_connected = False  # the client is gone
        except (
            BaseException
        ):  # a tokenizer's Rust code panics with what is no Exception
            logger.exception("request failed path=%s", self._path[:200])
            self._fail(SidecarError("internal error"))

    def _stream(self, stream: EventStream) -> None:
        try:
            headers = {"Cache-Control": "no-cache", **stream.headers}
            self._begin(200, stream.content_type, headers)
            writer = StreamWriter(
                self._piece, lambda: self._is_connected, self._config.keepalive_s
            )
            try:
                writer.run(stream)
            except SidecarError as error:
                self._piece(stream.encoder.failed(error))
            self._piece(b"", is_last=True)
        finally:
            stream.close()

    def _write(self, response: Response) -> None:
        length = {"Content-Length": str(len(response.body)), **response.headers}
        self._begin(response.status, response.content_type, length)
        is_head = self._scope["method"] == "HEAD"
        self._piece(b"" if is_head else response.body, is_last=True)

    def _fail(self, error: SidecarError) -> None:
        if self._is_begun or not self._is_connected:
            return
        kind, body = self._routes.problem(error, self._id, self._path[:200])
        self._write(problem_response(error, kind, body))

    def _begin(self, status: int, kind: str, headers: Any) -> None:
        self._is_begun = True
        named = {"Content-Type": kind, "X-Request-ID": self._id, **headers}
        pairs = [
            (name.lower().encode("latin-1"), str(value).encode("latin-1"))
            for name, value in named.items()
        ]
        start = {"type": "http.response.start", "status": status, "headers": pairs}
        self._sent(start)

    def _piece(self, data: bytes, *, is_last: bool = False) -> None:
        body = {"type": "http.response.body", "body": data, "more_body": not is_last}
        self._sent(body)

    def _sent(self, message: MutableMapping[str, Any]) -> None:
        """
        Have the event loop send it, and wait for that.

        Raises:
            ConnectionResetError: the client is gone. TimeoutError: it takes nothing.
        """
        if not self._is_connected:
            raise ConnectionResetError("the client closed the connection")
        sending: Any = self._send(message)
        asyncio.run_coroutine_threadsafe(sending, self._loop).result(_WRITE_S)


def _path_of(scope: Scope) -> str:
    """
    The path as the sidecar knows it, wherever the application is mounted.

    Servers and frameworks hand on the whole path, or what follows the mount's, its
    escapes read; the routes read them themselves.
    """
    path, root = (
        quote(str(scope["path"]), _PLAIN),
        str(scope.get("root_path", "")).rstrip("/"),
    )
    if root and path.startswith(f"{root}/"):
        path = path[len(root) :]
    is_whole = path.startswith(f"{_PREFIX}/")
    return path if is_whole else f"{_PREFIX}{path}"
