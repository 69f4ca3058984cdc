"""Writes an EventStream: encoded events, keep-alive, disconnect."""

import time
from collections.abc import Callable

from sidecar.core.events import Idle
from sidecar.server.messages import EventStream

_CHECK_S = 0.1


class StreamWriter:
    """
    Writes the events of one response.

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
        Write to the end.

        Raises:
            ConnectionResetError: the client is gone. SidecarError: from the events.
        """
        self._send(stream.encoder.started(stream.usage))
        for event in stream.events:
            self._check_client()
            if not isinstance(event, Idle):
                self._send(stream.encoder.event(event))
            elif time.monotonic() - self._last_write >= self._keepalive_s:
                self._send(stream.encoder.ping())

    def _check_client(self) -> None:
        now = time.monotonic()
        if now - self._last_check > _CHECK_S:
            self._last_check = now
            if not self._is_connected():
                raise ConnectionResetError("the client closed the connection")

    def _send(self, data: bytes) -> None:
        if data:
            self._last_write = time.monotonic()
            self._write(data)
