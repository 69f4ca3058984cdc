"""
Places for connections: who is idle makes room for who asks.

A connection is *idle* until the first byte of a request is read, *reading* until all of
it came in, *asking* until its answer is written, and idle again:

    enter --> idle --hear--> reading --begin--> asking --end--> idle --leave-->

When all places are taken, the one that is idle longest is closed, if it has sent
nothing that waits to be read; when none is idle, the one that is reading longest: a
crowd that connects, or sends half a request, drives out itself. When all ask, a few
more places are kept: health, admin and cancel are always answered.
"""

import contextlib
import select
import socket
import threading
from collections import OrderedDict

RESERVED = 8


class Places:
    """A bounded number of connections. Any thread."""

    def __init__(self, most: int, num_reserved: int = RESERVED) -> None:
        self._most = most
        self._num_reserved = num_reserved
        # The longest first.
        self._idle: OrderedDict[socket.socket, None] = OrderedDict()
        self._reading: OrderedDict[socket.socket, None] = OrderedDict()
        self._asking: dict[socket.socket, bool] = {}  # whether it is urgent
        self._lock = threading.Lock()

    @property
    def num_taken(self) -> int:
        """Connections that have a place."""
        with self._lock:
            return self._num_taken()

    def enter(self, connection: socket.socket) -> bool:
        """Give a new connection a place, perhaps another's; False: turn it away."""
        closed = None
        with self._lock:
            if self._num_taken() >= self._most and (self._idle or self._reading):
                closed = self._choose()
                self._forget(closed)
            elif self._num_taken() >= self._most + self._num_reserved:
                return False
            self._idle[connection] = None
        if closed is not None:
            _end(closed)
        return True

    def hear(self, connection: socket.socket) -> None:
        """Note that a request has begun to come in."""
        with self._lock:
            if connection in self._idle:
                del self._idle[connection]
                self._reading[connection] = None

    def begin(self, connection: socket.socket, *, is_urgent: bool) -> bool:
        """
        Note that a request came in whole; False: too many are being answered.

        Raises:
            ConnectionResetError: its place was given to another.
        """
        with self._lock:
            if connection not in self._idle and connection not in self._reading:
                raise ConnectionResetError("its place was given to another connection")
            num_usual = sum(not urgent for urgent in self._asking.values())
            if not is_urgent and num_usual >= self._most:
                return False
            self._forget(connection)
            self._asking[connection] = is_urgent
            return True

    def end(self, connection: socket.socket) -> None:
        """Note that the answer is written; repeatable."""
        with self._lock:
            if connection in self._asking or connection in self._reading:
                self._forget(connection)
                self._idle[connection] = None

    def leave(self, connection: socket.socket) -> None:
        """Free the place of a connection that is closed; repeatable."""
        with self._lock:
            self._forget(connection)

    def _num_taken(self) -> int:
        return len(self._idle) + len(self._reading) + len(self._asking)

    def _forget(self, connection: socket.socket) -> None:
        for state in (self._idle, self._reading, self._asking):
            state.pop(connection, None)

    def _choose(self) -> socket.socket:
        """Which of those that do not ask is closed."""
        silent = (one for one in self._idle if not _has_sent(one))
        return next(silent, None) or next(iter(self._reading or self._idle))


def _has_sent(connection: socket.socket) -> bool:
    """Whether there is something to read; does not wait."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # it was just closed
        return False


def _end(connection: socket.socket) -> None:
    """Wake the thread that reads from it; that one closes it."""
    with contextlib.suppress(OSError):  # it was just closed
        connection.shutdown(socket.SHUT_RDWR)
