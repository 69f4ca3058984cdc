"""
Places for connections: who only waits makes room for who asks.

A connection *waits* until a whole request of its came in, and again behind the answer:

    enter --> waiting --begin--> asking --end--> waiting --leave-->

When all places are taken, the one that has waited longest is closed, but for those
that came a moment ago: they may just be sending. Of a crowd that comes at once it is
the last that is closed, so that it drives out nobody who came before it. When none
waits, a few more places are kept: health, admin and cancel are always answered.
"""

import contextlib
import select
import socket
import threading
import time
from collections import OrderedDict

RESERVED = 8
_GRACE_S = 5.0  # for a request to come in whole, on a busy machine


class Places:
    """A bounded number of connections. Any thread."""

    def __init__(self, most: int, num_reserved: int = RESERVED) -> None:
        self._most = most
        self._num_reserved = num_reserved
        # Since when, the longest first.
        self._waiting: OrderedDict[socket.socket, float] = OrderedDict()
        self._asking: dict[socket.socket, bool] = {}  # whether it is urgent
        self._lock = threading.Lock()

    @property
    def num_taken(self) -> int:
        """Connections that have a place."""
        with self._lock:
            return len(self._waiting) + len(self._asking)

    def enter(self, connection: socket.socket) -> bool:
        """Give a new connection a place, perhaps another's; False: turn it away."""
        closed = None
        with self._lock:
            taken = len(self._waiting) + len(self._asking)
            if taken >= self._most and self._waiting:
                closed = self._choose()
                del self._waiting[closed]
            elif taken >= self._most + self._num_reserved:
                return False
            self._waiting[connection] = time.monotonic()
        if closed is not None:
            _end(closed)
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
                self._waiting[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the place of a connection that is closed; repeatable."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._asking.pop(connection, None)

    def _choose(self) -> socket.socket:
        """Which of those that wait is closed."""
        longest = next(iter(self._waiting))
        if time.monotonic() - self._waiting[longest] >= _GRACE_S:
            return longest
        silent = (one for one in reversed(self._waiting) if not _has_sent(one))
        return next(silent, longest)


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
