"""One connection: deadlines, limits, one try/except, writing."""

import contextlib
import http.server
import io
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from sidecar.core.errors import (
    BadRequest,
    RequestTimeout,
    SidecarError,
    Unavailable,
)
from sidecar.core.ports import StreamEncoder
from sidecar.infra.logs import request_id as request_id_var
from sidecar.server import access
from sidecar.server.form_body import FORM_PATHS
from sidecar.server.http_messages import (
    EventStream,
    Request,
    Response,
    StreamWriter,
    problem_response,
)
from sidecar.server.listener import Listener
from sidecar.server.request_body import (
    BodyHead,
    BodyShare,
    DeadlineReader,
    is_open,
    linger,
    read_body,
)
from sidecar.server.request_head import (
    HeadReader,
    parser_error,
    path_of,
    read_headers,
    request_id,
)
from sidecar.service.audit import AnsweredCall

logger = logging.getLogger(__name__)

_IDLE_S = 75.0  # between two requests of a kept-alive connection
_HEAD_S = 30.0
_BODY_GAP_S = 60.0
_BODY_S = 600.0
_WRITE_S = 60.0
_LINGER_S = 1.0
_LEFT = 499  # the client did, before all was written
# By name: a browser does not take `*` for Authorization.
_CORS_HEADERS = "Authorization, Content-Type, X-API-Key, X-Request-ID"
_EXPOSED = "Retry-After, X-Request-ID"
_CORS_METHODS = "GET, POST, DELETE, HEAD, OPTIONS"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-]+(, ?[A-Za-z0-9\-]+){0,63}")


_MAX_JOINED = 1 << 16  # bytes: what is larger is not copied for it


class EagerWriter(io.RawIOBase):
    """
    What is sent over a connection.

    Python waits until a socket with a deadline can be written to before it writes. Each
    wait lets go of the interpreter, and to get it back beside running streams takes
    longer than to write: so this one writes first, and waits where that is refused.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._held: list[bytes] | None = None

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """
        Send all of it.

        Raises:
            OSError: the client is gone, or does not read within its deadline.
        """
        if self._held is not None:
            self._held.append(bytes(data))
            return len(data)
        try:
            num_sent = os.write(self._connection.fileno(), data)
        except BlockingIOError:
            num_sent = 0
        if num_sent < len(data):
            self._connection.sendall(memoryview(data)[num_sent:])
        return len(data)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Send what is written within in one piece if it is small; else as it is."""
        self._held = []
        try:
            yield
            held, self._held = self._held, None
            is_small = sum(map(len, held)) <= _MAX_JOINED
            for piece in [b"".join(held)] if is_small else held:
                self.write(piece)
        finally:
            self._held = None


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # so that every answer has a status line
    server_version = "litellm-mlx"
    sys_version = ""
    server: Listener
    rfile: Any
    wfile: Any
    raw_requestline: bytes

    def setup(self) -> None:
        """Put the deadline reader under the stdlib's parser."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = DeadlineReader(self.connection)
        self._stream: io.BufferedReader = io.BufferedReader(self._reader, 1 << 16)
        self.rfile = self._stream
        self.wfile = EagerWriter(self.connection)
        self._forget_last_request()

    def handle_one_request(self) -> None:
        """Wait for a request, then read its head within its own deadline."""
        try:
            self._reader.allow(_IDLE_S, _IDLE_S)
            if not self.rfile.peek(1):
                self.close_connection = True
                return
            self.server.places.hear(self.connection)
            self._reader.allow(_HEAD_S, _HEAD_S)
            self._forget_last_request()
            super().handle_one_request()
        except (TimeoutError, OSError):
            self.close_connection = True

    def parse_request(self) -> bool:
        """Refuse HTTP/0.9 and the like before the stdlib waits for its headers."""
        words = self.raw_requestline.split()
        if words and (len(words) != 3 or not words[2].startswith(b"HTTP/1.")):
            self.send_error(
                HTTPStatus.BAD_REQUEST, "the first line must be METHOD PATH HTTP/1.1"
            )
            return False
        lines = HeadReader(self._stream, self.raw_requestline)
        self.rfile = lines
        try:
            is_parsed = super().parse_request()
        finally:
            self.rfile = self._stream
        if is_parsed and lines.is_broken:
            self.send_error(HTTPStatus.BAD_REQUEST, "a bare CR or a NUL in the head")
            return False
        return is_parsed

    def do_GET(self) -> None:
        """Every method goes the same way."""
        self._handle()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """The stdlib parser's own complaints, in our form."""
        self.close_connection = True
        self._write_error(parser_error(code, message))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged at their end, by the service."""

    def _forget_last_request(self) -> None:
        self._id = "-"
        self._started = time.monotonic()
        self._headers_sent = False
        self._is_chunked = False
        self._encoder: StreamEncoder | None = None
        self._status = _LEFT
        self._error: SidecarError | None = None
        self._lower: dict[str, str] = {}  # the headers, once they are found in order
        self.command = self.path = ""
        self.request_version = self.default_request_version
        self.headers = self.MessageClass()

    def _handle(self) -> None:
        self._id = request_id(self.headers.get("X-Request-ID", ""))
        token = request_id_var.set(self._id)
        path = path_of(self.path)
        try:
            self._answer(path, read_headers(self.headers))
        except SidecarError as error:
            self._fail(error)
        except TimeoutError:
            self.close_connection = True
            if not self._headers_sent:
                self._fail(RequestTimeout("the request took too long to arrive"))
        except OSError:
            self.close_connection = True
        except (
            BaseException
        ):  # a tokenizer's Rust code panics with what is no Exception
            logger.exception("request failed path=%s", path[:200])
            self._fail(SidecarError("internal error"))
        finally:
            self.server.places.end(self.connection)
            if self.server.audit.covers(self.command):
                self.server.audit.answered(self._answered(path))
            request_id_var.reset(token)
            self._error = None  # its frames hold what was asked, and this connection

    def _answer(self, path: str, headers: dict[str, str]) -> None:
        self._lower = headers
        if self.request_version != "HTTP/1.0" and not headers.get("host"):
            raise BadRequest("the header host is missing")
        access.check(self.server.config, self.command, path, headers)
        method = "GET" if self.command == "HEAD" else self.command
        endpoint, tail = self.server.routes.find(method, path)
        with BodyShare(self.server.bodies) as share:
            body = self._read_body(headers, share, is_form=path in FORM_PATHS)
            is_urgent = self.server.routes.is_urgent(path)
            if not self.server.places.begin(self.connection, is_urgent=is_urgent):
                raise Unavailable("too many requests at once", retry_after_s=1)
            request = Request(
                method,
                path,
                headers,
                body,
                self._id,
                tail,
                urlsplit(self.path).query,
                lambda: is_open(self.connection),
                address=str(self.client_address[0]),
            )
            self.connection.settimeout(_WRITE_S)
            later = self.server.batches
            is_first = later.is_active and not is_urgent
            with later.paused() if is_first else contextlib.nullcontext():
                response = endpoint(request)
                if isinstance(response, EventStream):
                    self._stream_events(response)
                else:
                    self._write(response)

    def _read_body(
        self, headers: dict[str, str], share: BodyShare, *, is_form: bool
    ) -> bytes:
        head = BodyHead(headers.get("content-length"), headers.get("transfer-encoding"))
        self._reader.allow(_BODY_GAP_S, _BODY_S)
        limit = self.server.config.max_body_mb << 20
        body = read_body(self._stream, head, limit, share.grow)
        if is_form:  # not JSON: its file is held twice
            share.grow(len(body))
        else:
            share.weigh(body)
        return body

    def _stream_events(self, stream: EventStream) -> None:
        try:
            self._is_chunked = self.request_version != "HTTP/1.0"
            self.close_connection = self.close_connection or not self._is_chunked
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            self._send_head(200, stream.content_type, {**headers, **stream.headers})
            self._encoder = stream.encoder
            writer = StreamWriter(
                self._write_chunk,
                lambda: is_open(self.connection),
                self.server.config.keepalive_s,
            )
            writer.run(stream)
            self._end_chunks()
            self._count(200)
        finally:
            stream.close()

    def _write_chunk(self, data: bytes) -> None:
        self.wfile.write(
            b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data
        )

    def _end_chunks(self) -> None:
        if self._is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _fail(self, error: SidecarError) -> None:
        """
        Before the first byte a status; after it an error event, and the end.

        A stream that ends so is whole to HTTP, and clients keep its connection for
        their next request: it stays open.
        """
        self._error = error
        try:
            if self._headers_sent:
                last = self._encoder.failed(error) if self._encoder else b""
                if last:
                    self._write_chunk(last)
                    self._end_chunks()
                else:  # what was sent must not look whole
                    self.close_connection = True
                self._count(error.status_hint)
            else:
                self._write_error(error)
        except OSError:
            self.close_connection = True

    def _write_error(self, error: SidecarError) -> None:
        self.close_connection = True  # the body may not have been read
        if self.server.places.refuse(self.connection):
            self._write_problem(error)
        self._reader.allow(_LINGER_S, _LINGER_S)
        linger(self._stream)

    def _write_problem(self, error: SidecarError) -> None:
        path = path_of(self.path)[:200]
        content_type, body = self.server.routes.problem(error, self._id, path)
        self._write(problem_response(error, content_type, body))
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self.server.places.end(self.connection)  # its place is free for others

    def _write(self, response: Response) -> None:
        with self.wfile.joined():
            self._send_head(
                response.status, response.content_type, response.headers, response.body
            )
            if self.command != "HEAD":
                self.wfile.write(response.body)
        self._count(response.status)

    def _send_head(
        self,
        status: int,
        content_type: str,
        headers: Any,
        body: bytes | None = None,
    ) -> None:
        """With the length of the body, if it is known."""
        self._headers_sent = True
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("X-Request-ID", self._id)
        origin = self.headers.get("Origin")
        if origin in self.server.config.cors_allow_origins:
            self.send_header("Access-Control-Allow-Origin", str(origin))
            asked = self.headers.get("Access-Control-Request-Headers", "")
            names = asked if _HEADER_NAMES.fullmatch(asked) else _CORS_HEADERS
            self.send_header("Access-Control-Allow-Headers", names)
            self.send_header("Access-Control-Allow-Methods", _CORS_METHODS)
            self.send_header("Access-Control-Expose-Headers", _EXPOSED)
            if "Access-Control-Request-Private-Network" in self.headers:
                self.send_header("Access-Control-Allow-Private-Network", "true")
            self.send_header("Vary", "Origin")
        if self._is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif body is not None:
            self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _answered(self, path: str) -> AnsweredCall:
        return AnsweredCall(
            self._id,
            self.command,
            path,
            self.server.routes.name(path),
            str(self.client_address[0]),
            self._status,
            time.monotonic() - self._started,
            self._lower.get("user-agent"),
            access.key_id(self._lower),
            self._lower.get("traceparent", ""),
            self._error,
        )

    def _count(self, status: int) -> None:
        self._status = status
        endpoint = self.server.routes.name(path_of(self.path))
        metrics = self.server.metrics
        metrics.requests.labels(endpoint, str(status)).inc()
        metrics.latency.labels(endpoint).observe(time.monotonic() - self._started)
