"""HTTP by hand: sends exactly these bytes, reads exactly what comes back."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

_TIMEOUT_S = 120.0  # far beyond what a busy machine needs


@dataclass(frozen=True)
class Answer:
    """One response; `status` 0: the connection was closed without one."""

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The value of a header, None if it is absent."""
        return dict(self.headers).get(name)

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


CLOSED = Answer()


@contextlib.contextmanager
def connect(port: int) -> Iterator[socket.socket]:
    """A connection to this machine; nothing waits longer than two minutes."""
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        yield connection


def exchange(
    port: int, data: bytes, *, end: bool = False, head: bool = False
) -> Answer:
    """Send `data` on a new connection; `end` says that nothing more will come."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer before the end
            connection.sendall(data)
            if end:
                connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            return read_answer(stream, head=head)


def exchange_all(port: int, data: bytes) -> list[Answer]:
    """Send `data`, end the sending side, and read all responses."""
    answers = []
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            while (answer := read_answer(stream)) != CLOSED:
                answers.append(answer)
    return answers


def read_answer(stream: BinaryIO, *, head: bool = False) -> Answer:
    """Read one response; TimeoutError means that the server hangs."""
    try:
        line = stream.readline()
        if not line:
            return CLOSED
        version, status, *_ = line.split()
        assert version == b"HTTP/1.1", line
        headers = []
        while line := stream.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name.lower(), value.strip()))
        body = b"" if head else _read_body(stream, dict(headers))
        return Answer(int(status), tuple(headers), body)
    except ConnectionError:
        return CLOSED


def _read_body(stream: BinaryIO, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        length = headers.get("content-length")
        return stream.read(-1 if length is None else int(length))
    body = b""
    while size := int(stream.readline(), 16):
        body += stream.read(size)
        stream.readline()
    stream.readline()
    return body


def request(
    path: str,
    body: bytes | None = None,
    headers: tuple[str, ...] = (),
    *,
    method: str | None = None,
    host: str | None = "localhost",
) -> bytes:
    """A well-formed request; POST with its length if there is a body."""
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1"]
    if host is not None:
        lines.append(f"Host: {host}")
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + (body or b"")


def eventually(check: Any, timeout_s: float = _TIMEOUT_S) -> bool:
    """Whether `check()` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.01)
    return bool(check())
