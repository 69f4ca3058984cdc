"""
Places for connections: who only waits makes room for who asks.

A connection *waits* until a whole request of its came in, and again behind the answer:

    enter --> waiting --begin--> asking --end--> waiting --leave-->

When all places are taken, the one that has waited longest is closed. When none waits,
a few more places are kept: health, admin and cancel are answered however many ask.
"""

import contextlib
import socket
import threading
from collections import OrderedDict

RESERVED = 8


class Places:
    """A bounded number of connections. Any thread."""

    def __init__(self, most: int, num_reserved: int = RESERVED) -> None:
        self._most = most
        self._num_reserved = num_reserved
        self._waiting: OrderedDict[socket.socket, None] = OrderedDict()  # longest first
        self._asking: dict[socket.socket, bool] = {}  # whether it is urgent
        self._lock = threading.Lock()

    @property
    def num_taken(self) -> int:
        """Connections that have a place."""
        with self._lock:
            return len(self._waiting) + len(self._asking)

    def enter(self, connection: socket.socket) -> bool:
        """Give a new connection a place, perhaps another's; False: turn it away."""
        longest = None
        with self._lock:
            taken = len(self._waiting) + len(self._asking)
            if taken >= self._most and self._waiting:
                longest, _ = self._waiting.popitem(last=False)
            elif taken >= self._most + self._num_reserved:
                return False
            self._waiting[connection] = None
        if longest is not None:
            _end(longest)
        return True

    def begin(self, connection: socket.socket, *, is_urgent: bool) -> bool:
        """
        Note that a request came in whole; False: too many are being answered.

        Raises:
            ConnectionResetError: its place was given to another.
        """
        with self._lock:
            if connection not in self._waiting:
                raise ConnectionResetError("its place was given to another connection")
            num_usual = sum(not urgent for urgent in self._asking.values())
            if not is_urgent and num_usual >= self._most:
                return False
            del self._waiting[connection]
            self._asking[connection] = is_urgent
            return True

    def end(self, connection: socket.socket) -> None:
        """Note that the answer is written; repeatable."""
        with self._lock:
            if self._asking.pop(connection, None) is not None:
                self._waiting[connection] = None

    def leave(self, connection: socket.socket) -> None:
        """Free the place of a connection that is closed; repeatable."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._asking.pop(connection, None)


def _end(connection: socket.socket) -> None:
    """Wake the thread that reads from it; that one closes it."""
    with contextlib.suppress(OSError):  # it was just closed
        connection.shutdown(socket.SHUT_RDWR)
