"""Reading a request from a socket with deadlines, and looking whether it closed."""

import io
import re
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from sidecar.core.errors import (
    BadRequest,
    HeadersTooLarge,
    PayloadTooLarge,
)

_CHUNK = 1 << 16
_PIECE = 1 << 20
# int() alone would take signs, underscores and 0x.
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?\r?\n")


class DeadlineReader(io.RawIOBase):
    """
    A socket's bytes, with a limit on the wait for more and on the whole.

    A peer that sends one byte now and then does not hold a thread: each read may
    wait `gap_s`, and none past the deadline.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._gap_s = 30.0
        self._deadline = time.monotonic() + self._gap_s

    def allow(self, gap_s: float, total_s: float) -> None:
        """Set the limits from now on."""
        self._gap_s = gap_s
        self._deadline = time.monotonic() + total_s

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Raises TimeoutError when a limit is passed."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(min(left, self._gap_s))
        return self._connection.recv_into(buffer)


@dataclass(frozen=True, slots=True)
class BodyHead:
    """What a request's head says of its body: two headers, None if they are absent."""

    length: str | None
    encoding: str | None


def read_body(
    stream: io.BufferedReader, head: BodyHead, limit: int, took: Callable[[int], None]
) -> bytes:
    """
    Read a request body of at most `limit` bytes.

    Args:
        took: told how many bytes more are held; what it raises ends the reading.
    Raises:
        PayloadTooLarge: before it is read whole. BadRequest.
    """
    length, encoding = head.length, head.encoding
    if encoding is not None:
        if encoding.lower() != "chunked" or length is not None:
            raise BadRequest("Transfer-Encoding must be chunked, without a length")
        return _read_chunked(stream, limit, took)
    if length is None:
        return b""  # RFC 9112, 6.3: a request that announces none has none
    if not (length.isascii() and length.isdigit()):
        raise BadRequest("Content-Length must be a whole number of bytes")
    if len(length) > 18 or int(length) > limit:
        raise _too_large(limit)
    return _exactly(stream, int(length), took)


def is_open(connection: socket.socket) -> bool:
    """Whether the peer has not closed its end; does not wait or read."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLHUP | select.POLLERR)
    try:
        ready = poll.poll(0)
    except OSError:
        return False
    if not ready:
        return True
    if ready[0][1] & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def linger(connection: socket.socket, stream: io.BufferedReader) -> None:
    """Let the client read an answer before its unread input resets the line."""
    try:
        connection.shutdown(socket.SHUT_WR)
        while stream.read1(_CHUNK):
            pass
    except (OSError, ValueError):
        pass


def _read_chunked(
    stream: io.BufferedReader, limit: int, took: Callable[[int], None]
) -> bytes:
    body = bytearray()
    while True:
        match = _CHUNK_SIZE.fullmatch(stream.readline(1024))
        if match is None:
            raise BadRequest("a chunk of the body has no valid size")
        size = int(match[1], 16)
        if len(body) + size > limit:
            raise _too_large(limit)
        if size == 0:
            _skip_trailers(stream)
            return bytes(body)
        body += _exactly(stream, size, took)
        if stream.readline(3) not in (b"\r\n", b"\n"):
            raise BadRequest("a chunk of the body is longer than its size")


def _skip_trailers(stream: io.BufferedReader) -> None:
    for _ in range(100):
        if not stream.readline(_CHUNK).strip():
            return
    raise HeadersTooLarge("too many trailers")


def _exactly(
    stream: io.BufferedReader, size: int, took: Callable[[int], None]
) -> bytes:
    body = io.BytesIO()  # gives its bytes away without a copy
    while size:
        piece = stream.read(min(size, _PIECE))
        if not piece:
            raise ConnectionResetError("the client closed before its body was complete")
        took(len(piece))
        body.write(piece)
        size -= len(piece)
    return body.getvalue()


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body must be at most {limit} bytes")
