"""
Connections beyond the limit, and idle ones that make room: each is sent a 503.

A socket that is closed while its client still sends is reset, and what was written to
the client may be lost. So what it sends is read on for a while: by its thread if it has
one, else by the accepting loop.
"""

import contextlib
import select
import socket
import threading
import time
from collections import OrderedDict

_LINGER_S = 3.0  # a client in a crowd takes its time to send what it connected for
_MAX_READS = 16  # of one connection at a look
_PIECE = 1 << 16
_BODY = b'{"error":{"message":"too many connections","code":"rate_limited"}}'
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
) % (len(_BODY), _BODY)


class TurnedAway:
    """
    Tells connections that there is no room, and ends them soon. Any thread.

    Args:
        most: at once; beyond, the one that was refused first is ended at once.

    `num_refused` are there now: without any there is nothing to `look` at, or to
    `leave`.
    """

    def __init__(self, maximum: int) -> None:
        self.num_refused = 0
        self._max = maximum
        self._until: OrderedDict[socket.socket, float] = OrderedDict()
        self._threadless: set[socket.socket] = set()
        self._lock = threading.Lock()

    def tell(self, connection: socket.socket, *, has_thread: bool) -> None:
        """
        Answer 503; nobody else may write to it.

        Args:
            has_thread: one that reads from it and closes it.
        """
        with contextlib.suppress(OSError):  # its client has just gone
            if _is_writable(connection):
                connection.send(_ANSWER)
            connection.shutdown(socket.SHUT_WR)
            if not has_thread:
                connection.setblocking(False)
        with self._lock:
            self._until[connection] = time.monotonic() + _LINGER_S
            self.num_refused = len(self._until)
            if not has_thread:
                self._threadless.add(connection)
            over = list(self._until)[: -self._max]
        for one in over:
            self._end(one)

    def look(self) -> None:
        """Read what came, and end those whose time is up."""
        with self._lock:
            now = time.monotonic()
            over = [one for one, until in self._until.items() if until < now]
            waiting = self._threadless.difference(over)
        for one in (*over, *(one for one in waiting if not _is_sending(one))):
            self._end(one)

    def leave(self, connection: socket.socket) -> None:
        """Forget one that is closed; repeatable."""
        with self._lock:
            self._until.pop(connection, None)
            self.num_refused = len(self._until)
            self._threadless.discard(connection)

    def close(self) -> None:
        """End all."""
        with self._lock:
            left = list(self._until)
        for one in left:
            self._end(one)

    def _end(self, connection: socket.socket) -> None:
        """Wake the thread that reads from it, which closes it; or close it."""
        with self._lock:
            is_mine = connection in self._threadless
        self.leave(connection)
        with contextlib.suppress(OSError):  # it was just closed
            connection.shutdown(socket.SHUT_RDWR)
        if is_mine:
            connection.close()


def _is_writable(connection: socket.socket) -> bool:
    """Whether its client has read what was sent before; does not wait."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))


def _is_sending(connection: socket.socket) -> bool:
    """Read what is there; whether more may come."""
    try:
        for _ in range(_MAX_READS):
            if not connection.recv(_PIECE):
                return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True
