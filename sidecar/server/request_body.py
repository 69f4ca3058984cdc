"""
Reads a request's body from a socket: deadlines, sizes, and a bound on parsed JSON.

A list of empty lists takes forty times its bytes once it is parsed, so the values of a
JSON text are counted before: each but the first stands behind an opening bracket, a
comma or a colon that is no part of a string.
"""

import io
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sidecar.core.errors import (
    BadRequest,
    HeadersTooLarge,
    PayloadTooLarge,
    Unavailable,
)

_SLICE = 1 << 16  # the interpreter's lock is free between two
_MARKS = b"[{,:"


def count_values(text: bytes, limit: int) -> int:
    """
    An upper bound of the number of values, exact as far as it can matter.

    Linear in the text; stops soon once it is past the limit. Of a text that is not
    JSON the count says nothing, but that its parse will not make more values either.
    """
    roughly = 1 + sum(text.count(mark) for mark in (b"[", b"{", b",", b":"))
    return roughly if roughly <= limit else _count_outside_strings(text, limit)


def _count_outside_strings(text: bytes, limit: int) -> int:
    num_values, start, is_inside = 1, 0, False
    while start < len(text) and num_values <= limit:
        end = _end_of_slice(text, start)
        plain = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = plain.split(b'"')
        outside = b"".join(pieces[is_inside::2])
        num_values += sum(outside.count(bytes((mark,))) for mark in _MARKS)
        is_inside ^= len(pieces) % 2 == 0
        start = end
    return num_values


def _end_of_slice(text: bytes, start: int) -> int:
    """Not between a backslash and what it escapes."""
    end = min(start + _SLICE, len(text))
    run = 0
    while run < end - start and text[end - 1 - run] == 0x5C:
        run += 1
    return end + run % 2


# The longest prompt of token ids has 2**18; long conversations a tenth of that.
MAX_VALUES = 1_000_000
_VALUE_BYTES = 128  # of a parsed value; a list in a list takes 64
# So much of each body is free: small ones are served while large ones fill the rest.
_FREE = 1 << 20
_MIN = 512 << 20


class BodyBudget:
    """
    What all bodies may take together. Any thread.

    Args:
        limit_bytes: the largest body allowed; some of that size fit beside each other.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._max = max(4 * limit_bytes, _MIN)
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes taken now."""
        with self._lock:
            return self._used

    def take(self, num_bytes: int) -> None:
        """
        Take bytes, or give them back.

        Raises:
            Unavailable: there are not so many.
        """
        with self._lock:
            if num_bytes > 0 and self._used + num_bytes > self._max:
                raise Unavailable("too many large bodies at once", retry_after_s=2)
            self._used += num_bytes


class BodyShare:
    """What one body takes, from its first byte to the end of its answer."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.take(-max(0, self._size - _FREE))
        self._size = 0

    def grow(self, num_bytes: int) -> None:
        """
        Count more bytes of it.

        Raises:
            Unavailable: the bodies of others leave no room.
        """
        before = max(0, self._size - _FREE)
        self._budget.take(max(0, self._size + num_bytes - _FREE) - before)
        self._size += num_bytes

    def weigh(self, body: bytes) -> None:
        """
        Count what a whole body becomes when it is parsed.

        Its texts are held beside it, and what the images among them are decoded to.

        Raises:
            PayloadTooLarge: it holds too many values. Unavailable.
        """
        num_values = count_values(body, MAX_VALUES)
        if num_values > MAX_VALUES:
            raise PayloadTooLarge(f"a body must hold at most {MAX_VALUES} JSON values")
        self.grow(2 * len(body) + num_values * _VALUE_BYTES)


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
        took: called with how many bytes more are held; what it raises ends the reading.
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


def linger(stream: io.BufferedReader) -> None:
    """Let the client read an answer before its unread input resets the line."""
    try:
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
