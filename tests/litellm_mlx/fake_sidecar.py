"""
A sidecar without a model: answers from scripts, logs what it was asked.

A script belongs to a model name, so tests that run against one server (and one
proxy) do not meet: each takes names of its own. It also plays the cloud.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.litellm_mlx.sidecar_answers import (
    Json,
    Script,
    Step,
    rich_answer,
    whole_answer,
)


@dataclass
class Call:
    """One request as it came in, and when it was answered or its client found gone."""

    path: str
    headers: dict[str, str]
    body: Json
    at: float
    raw: bytes = b""
    gone_at: float | None = None
    answered_at: float | None = None

    @property
    def call_id(self) -> str:
        return self.headers["x-request-id"]


class FakeSidecar:
    """A real HTTP server on a free loopback port. Use as a context manager."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.calls: list[Call] = []
        self.cancelled: dict[str, float] = {}
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.root = f"http://127.0.0.1:{self._server.server_port}"
        self.base = f"{self.root}/v1"

    def __enter__(self) -> "FakeSidecar":
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(120)

    def on(self, model: str, script: Script) -> str:
        """Answer requests for this model by the script; returns the name."""
        self.scripts[model] = script
        return model

    def calls_for(self, model: str) -> list[Call]:
        return [call for call in self.calls if call.body.get("model") == model]

    def is_asked(self, text: str) -> bool:
        """Whether a request with this text in it has come."""
        return any(text.encode() in call.raw for call in self.calls)

    def last_call(self, model: str) -> Call:
        return self.calls_for(model)[-1]

    def is_cancelled(self, model: str) -> bool:
        """Every call for this model, and there is one, was cancelled by its id."""
        ids = {call.call_id for call in self.calls_for(model)}
        return bool(ids) and ids <= self.cancelled.keys()


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait for a condition; fail the test when it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.01)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeSidecar

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.startswith("/v1/cancel/"):
            call_id = self.path.removeprefix("/v1/cancel/")
            self.fake.cancelled[call_id] = time.monotonic()
            self._send_json(200, {"cancelled": True})
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = Call(self.path, headers, json.loads(raw), time.monotonic(), raw)
        self.fake.calls.append(call)
        self._answer(call)
        call.answered_at = time.monotonic()

    def _answer(self, call: Call) -> None:
        model = call.body["model"]
        script = self.fake.scripts.get(model) or Script(steps=rich_answer(model))
        time.sleep(script.wait_s)
        if script.gate is not None:
            self._wait(script.gate, call)
        if script.problem is not None:
            self._send_json(script.status, script.problem, script.headers)
        elif call.path == "/v1/embeddings":
            self._send_json(200, script.body or {"data": []})
        elif not call.body.get("stream"):
            whole = script.body or whole_answer(model)
            self._send_json(200, whole, script.headers)
        else:
            self._stream(script, call)

    def _wait(self, gate: threading.Event, call: Call) -> None:
        deadline = time.monotonic() + 280
        while not gate.wait(0.02) and time.monotonic() < deadline:
            if call.call_id in self.fake.cancelled:
                return

    def _stream(self, script: Script, call: Call) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        for name, value in script.headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for piece in _pieces(script.steps):
                if script.is_cancelled_by_id and call.call_id in self.fake.cancelled:
                    break
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            if not script.is_cut:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            call.gone_at = time.monotonic()
        self.close_connection = True

    def _send_json(
        self, status: int, body: Json, headers: Mapping[str, str] | None = None
    ) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        is_problem = status >= 400
        kind = "application/problem+json" if is_problem else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)


def _pieces(steps: list[Step]) -> Iterator[bytes]:
    for step in steps:
        if isinstance(step, float):
            time.sleep(step)
        elif isinstance(step, bytes):
            yield step
        else:
            yield f"data: {json.dumps(step)}\n\n".encode()
