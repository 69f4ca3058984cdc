"""Writes an EventStream: chunked server-sent events, keep-alive, disconnect."""

import time
from collections.abc import Callable
from typing import Any

import orjson

from sidecar.server.messages import EventStream

_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keepalive\n\n"
_CHECK_S = 0.1


def frame(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class StreamWriter:
    """
    Writes the frames of one response.

    Args:
        write: sends bytes to the client; raises OSError if it is gone.
        is_connected: whether the client is still there.
        keepalive_s: longest silence.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        is_connected: Callable[[], bool],
        keepalive_s: float,
    ) -> None:
        self._write = write
        self._is_connected = is_connected
        self._keepalive_s = keepalive_s
        self._last_write = self._last_check = time.monotonic()

    def run(self, stream: EventStream) -> None:
        """
        Write to the end, and `[DONE]`.

        Raises:
            ConnectionResetError: the client is gone. SidecarError: from the frames.
        """
        for item in stream.frames:
            now = time.monotonic()
            if now - self._last_check > _CHECK_S:
                self._last_check = now
                if not self._is_connected():
                    raise ConnectionResetError("the client closed the connection")
            if item is not None:
                self._send(frame(item))
            elif now - self._last_write >= self._keepalive_s:
                self._send(frame(stream.keepalive) if stream.keepalive else _COMMENT)
        self._send(_DONE)

    def _send(self, data: bytes) -> None:
        self._last_write = time.monotonic()
        self._write(data)
