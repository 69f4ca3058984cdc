"""Stands between a client and the proxy and writes down what passes, unchanged."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
_SECRET = {"authorization", "x-api-key", "api-key", "cookie"}
_TIMEOUT_S = 300.0


class Recorder(ThreadingHTTPServer):
    """
    A pass-through server on a free port.

    Args:
        port: of the proxy. out: where the rows go, one JSON line an exchange.
    """

    daemon_threads = True

    def __init__(self, port: int, out: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = port
        self._out = out
        self._lock = threading.Lock()
        self._num_seen = 0

    @property
    def url(self) -> str:
        """Its root, for clients."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, row: dict[str, Any]) -> None:
        """Write an exchange down."""
        with self._lock, self._out.open("a", encoding="utf-8") as file:
            self._num_seen += 1
            line = {"seq": self._num_seen, **row}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def log_message(self, *_arguments: Any) -> None:
        pass

    def _pass(self) -> None:
        body = self._body()
        started = time.time()
        row: dict[str, Any] = {
            "ts": round(started, 3), "method": self.command, "path": self.path,
            "headers": {k: v for k, v in self.headers.items()
                        if k.lower() not in _SECRET},
            "body": _readable(body),
        }  # fmt: skip
        port = self.server.upstream_port
        upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        answer = b""
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            headers["Accept-Encoding"] = "identity"
            upstream.request(self.command, self.path, body or None, headers)
            response = upstream.getresponse()
            row["status"] = response.status
            answer = self._forward(response)
        except OSError as error:
            row["broken"] = repr(error)
            self.close_connection = True
        finally:
            upstream.close()
            row["seconds"] = round(time.time() - started, 3)
            row["answer"] = _readable(answer)
            self.server.add(row)

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _pass  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _forward(self, response: http.client.HTTPResponse) -> bytes:
        self.send_response(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP | {"date", "server"}:
                self.send_header(name, value)
        if self.command == "HEAD" or response.status in (204, 304):
            self.send_header("Content-Length", "0")
            self.end_headers()
            return b""
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        seen = []
        while part := response.read1(65536):
            seen.append(part)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        return b"".join(seen)


def _readable(body: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(body)
    return body.decode("utf-8", "replace")


@contextlib.contextmanager
def recording(port: int, out: Path) -> Iterator[Recorder]:
    """A recorder that runs; closed at the end."""
    recorder = Recorder(port, out)
    thread = threading.Thread(target=recorder.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.shutdown()
        recorder.server_close()
        thread.join(5)
