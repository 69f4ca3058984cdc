"""The listener and the handler: limits, deadlines, one try/except, writing."""

import http.server
import io
import logging
import re
import secrets
import socket
import threading
import time
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import orjson

from sidecar.config import ServerConfig
from sidecar.core.errors import (
    BadRequest,
    HeadersTooLarge,
    MethodNotAllowed,
    RequestTimeout,
    SidecarError,
)
from sidecar.infra.logs import request_id as request_id_var
from sidecar.infra.metrics import Metrics
from sidecar.protocols.problem import error_object, problem
from sidecar.server import gate
from sidecar.server.body import DeadlineReader, is_open, read_body
from sidecar.server.messages import EventStream, Request, Response
from sidecar.server.routes import Routes
from sidecar.server.sse import StreamWriter, frame

logger = logging.getLogger(__name__)

_IDLE_S = 75.0  # between two requests of a kept-alive connection
_HEAD_S = 30.0
_BODY_GAP_S = 60.0
_BODY_S = 600.0
_WRITE_S = 60.0
_LINGER_S = 1.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_HEAD_BYTES = 64 * 1024


class Listener(http.server.ThreadingHTTPServer):
    """A bounded number of connections, one thread each."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, config: ServerConfig, routes: Routes, metrics: Metrics) -> None:
        self.config = config
        self.routes = routes
        self.metrics = metrics
        self._places = threading.BoundedSemaphore(config.max_connections)
        if ":" in config.host:
            self.address_family = socket.AF_INET6
        super().__init__((config.host, config.port), Handler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Bind without the reverse name look-up of http.server, which can hang."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.config.host, self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or turn it away."""
        if not self._places.acquire(blocking=False):
            self._turn_away(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection; its place is free afterwards."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is normal; anything else is a defect."""
        logger.debug("connection ended with an error", exc_info=True)

    def _turn_away(self, request: Any) -> None:
        body = b'{"error":{"message":"too many connections","code":"rate_limited"}}'
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            "Retry-After: 1\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            request.settimeout(0.2)
            request.sendall(head.encode() + body)
        except OSError:
            pass
        self.shutdown_request(request)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "litellm-mlx"
    sys_version = ""
    server: Listener
    rfile: Any

    def setup(self) -> None:
        """Put the deadline reader under the stdlib's parser."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self._reader, 1 << 16)
        self._id = "-"
        self._started = time.monotonic()
        self._headers_sent = False

    def handle_one_request(self) -> None:
        """Wait for a request, then read its head within its own deadline."""
        try:
            self._reader.allow(_IDLE_S, _IDLE_S)
            if not self.rfile.peek(1):
                self.close_connection = True
                return
            self._reader.allow(_HEAD_S, _HEAD_S)
            self._started = time.monotonic()
            self._headers_sent = False
            super().handle_one_request()
        except (TimeoutError, OSError):
            self.close_connection = True

    def do_GET(self) -> None:
        """Every method goes the same way."""
        self._handle()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """The stdlib parser's own complaints, in our form."""
        self.close_connection = True
        error: SidecarError = BadRequest(message or HTTPStatus(code).phrase)
        if code == HTTPStatus.NOT_IMPLEMENTED:
            error = MethodNotAllowed(message or "no such method")
        elif code in (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            HTTPStatus.REQUEST_URI_TOO_LONG,
        ):
            error = HeadersTooLarge(message or "the request head is too large")
        self._write_error(error)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged at their end, by the service."""

    def _handle(self) -> None:
        headers = {k.lower(): v for k, v in self.headers.items()}
        given = headers.get("x-request-id", "")
        self._id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        token = request_id_var.set(self._id)
        path = urlsplit(self.path).path.rstrip("/") or "/"
        try:
            self._answer(path, headers)
        except SidecarError as error:
            self._fail(error)
        except TimeoutError:
            self._fail(RequestTimeout("the request body took too long to arrive"))
        except OSError:
            self.close_connection = True
        except Exception:
            logger.exception("request failed path=%s", path[:200])
            self._fail(SidecarError("internal error"))
        finally:
            request_id_var.reset(token)

    def _answer(self, path: str, headers: dict[str, str]) -> None:
        config = self.server.config
        if sum(len(k) + len(v) for k, v in headers.items()) > _MAX_HEAD_BYTES:
            raise HeadersTooLarge(f"headers must be at most {_MAX_HEAD_BYTES} bytes")
        gate.check(config, path, headers)
        if self.command == "OPTIONS":
            self._write(Response(b"", 204, headers={"Allow": "GET, POST, HEAD"}))
            return
        method = "GET" if self.command == "HEAD" else self.command
        endpoint, tail = self.server.routes.find(method, path)
        body = b""
        if method == "POST" or "content-length" in headers:
            self._reader.allow(_BODY_GAP_S, _BODY_S)
            length = headers.get("content-length")
            if tail and length is None and "transfer-encoding" not in headers:
                length = "0"  # an order such as cancel may come without a body
            encoding = headers.get("transfer-encoding", "").lower()
            limit = config.max_body_mb << 20
            body = read_body(self.rfile, length, encoding, limit)
        request = Request(
            method, path, headers, body, self._id, tail,
            lambda: is_open(self.connection),
        )  # fmt: skip
        self.connection.settimeout(_WRITE_S)
        response = endpoint(request)
        if isinstance(response, EventStream):
            self._stream(response)
        else:
            self._write(response)

    def _stream(self, stream: EventStream) -> None:
        try:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            self._send_head(
                200, "text/event-stream; charset=utf-8", {**headers, **stream.headers}
            )
            if self.command == "HEAD":
                return
            writer = StreamWriter(
                self._write_chunk,
                lambda: is_open(self.connection),
                self.server.config.keepalive_s,
            )
            writer.run(stream)
            self.wfile.write(b"0\r\n\r\n")
            self._count(200)
        finally:
            stream.close()

    def _write_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _fail(self, error: SidecarError) -> None:
        """Before the first byte a status; after it an error event, and the end."""
        try:
            if self._headers_sent:
                self.close_connection = True
                self._write_chunk(frame({"error": error_object(error)}))
                self.wfile.write(b"0\r\n\r\n")
                self._count(error.status_hint)
            else:
                self._write_error(error)
        except OSError:
            self.close_connection = True

    def _write_error(self, error: SidecarError) -> None:
        path = getattr(self, "path", "")
        body = problem(error, self._id, urlsplit(path).path[:200])
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        if error.status_hint == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self.close_connection = True  # the body may not have been read
        content_type = "application/problem+json"
        status = error.status_hint
        self._write(Response(orjson.dumps(body), status, content_type, headers))
        self._linger()

    def _write(self, response: Response) -> None:
        self._send_head(
            response.status, response.content_type, response.headers, response.body
        )
        if getattr(self, "command", "") != "HEAD":
            self.wfile.write(response.body)
        self._count(response.status)

    def _send_head(
        self,
        status: int,
        content_type: str,
        headers: Any,
        body: bytes | None = None,
    ) -> None:
        """Length of the body, or chunked if there is none yet."""
        self._headers_sent = True
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("X-Request-ID", self._id)
        origin = self.headers.get("Origin") if getattr(self, "headers", None) else None
        if origin in self.server.config.cors_allow_origins:
            self.send_header("Access-Control-Allow-Origin", str(origin))
            self.send_header("Access-Control-Allow-Headers", "*")
            self.send_header("Vary", "Origin")
        if body is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _linger(self) -> None:
        """Let the client read the answer before unread input resets the line."""
        try:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self._reader.allow(_LINGER_S, _LINGER_S)
            while self.rfile.read1(1 << 16):
                pass
        except (OSError, ValueError):
            pass

    def _count(self, status: int) -> None:
        endpoint = self.server.routes.name(getattr(self, "path", ""))
        metrics = self.server.metrics
        metrics.requests.labels(endpoint, str(status)).inc()
        metrics.latency.labels(endpoint).observe(time.monotonic() - self._started)
