"""
The listening socket: a bounded number of connections, each with its thread.

A connection is *idle* until the first byte of a request is read, *reading* until all of
it came in, *asking* until its answer is written, and idle again:

    enter --> idle --hear--> reading --begin--> asking --end--> idle --leave-->

When all places are taken, the one that is idle longest is closed, if it has sent
nothing that waits to be read; when none is idle, the one that is reading longest: a
crowd that connects, or sends half a request, drives out itself. When all ask, a few
more places are kept: health, admin and cancel are always answered. Who gets no place,
or loses it, is answered so (turned_away); a connection's thread writes while it
has one.
"""

import http.server
import logging
import select
import socket
import socketserver
import sys
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sidecar.config.settings import ServerConfig
from sidecar.infra.malloc import IdleTrim
from sidecar.infra.metrics import Metrics
from sidecar.server.http_messages import Router
from sidecar.server.request_body import BodyBudget
from sidecar.server.turned_away import TurnedAway
from sidecar.service.audit import Audit

RESERVED = 8
_REFUSED_AT_ONCE = 4  # times the places; each of them holds a thread for some seconds


class ConnectionLimiter:
    """A bounded number of connections. Any thread."""

    def __init__(self, maximum: int, num_reserved: int = RESERVED) -> None:
        self._max = maximum
        self._num_reserved = num_reserved
        # The longest first.
        self._idle: OrderedDict[socket.socket, None] = OrderedDict()
        self._reading: OrderedDict[socket.socket, None] = OrderedDict()
        self._asking: dict[socket.socket, bool] = {}  # whether it is urgent
        self._num_begun = 0  # that are not
        self.turned_away = TurnedAway(_REFUSED_AT_ONCE * maximum)
        self._lock = threading.Lock()

    @property
    def num_taken(self) -> int:
        """Connections that have a place."""
        with self._lock:
            return self._num_taken()

    @property
    def work(self) -> tuple[int, int]:
        """Requests begun so far and requests being answered, urgent ones left out."""
        with self._lock:
            running = sum(not urgent for urgent in self._asking.values())
            return self._num_begun, running

    def enter(self, connection: socket.socket) -> bool:
        """Give a new connection a place, perhaps another's; False: it got none."""
        with self._lock:
            if self._num_taken() >= self._max and (self._idle or self._reading):
                closed = self._choose()
                self._forget(closed)
                # Under the lock, without a wait: else its thread could close it first.
                self.turned_away.tell(closed, has_thread=True)
            has_place = self._num_taken() < self._max + self._num_reserved
            if has_place:
                self._idle[connection] = None
        if not has_place:
            self.turned_away.tell(connection, has_thread=False)
        return has_place

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
            if not is_urgent and num_usual >= self._max:
                return False
            self._forget(connection)
            self._asking[connection] = is_urgent
            self._num_begun += not is_urgent
            return True

    def refuse(self, connection: socket.socket) -> bool:
        """Note that an error is to be written; False: it was noted already."""
        with self._lock:
            if connection in self._idle or connection in self._reading:
                self._forget(connection)
                self._asking[connection] = True
            return connection in self._asking

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
        if self.turned_away.num_refused:
            self.turned_away.leave(connection)

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


logger = logging.getLogger(__name__)


class WorkForLater(Protocol):
    """
    What is done while nobody waits for an answer.

    Args:
        is_active: whether something is being done; a request looks once it is counted.
    """

    is_active: bool

    def paused(self) -> AbstractContextManager[None]:
        """Have a request go before it."""


class Listener(http.server.ThreadingHTTPServer):
    """A bounded number of connections, one thread each."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        config: ServerConfig,
        routes: Router,
        metrics: Metrics,
        handler: type[socketserver.BaseRequestHandler],
        places: ConnectionLimiter,
        batches: WorkForLater,
        audit: Audit,
    ) -> None:
        self.config, self.audit = config, audit
        self.places, self.batches = places, batches
        self.routes = routes
        self.metrics = metrics
        self._idle = IdleTrim()
        self.bodies = BodyBudget(config.max_body_mb << 20)
        if ":" in config.host:
            self.address_family = socket.AF_INET6
        super().__init__((config.host, config.port), handler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Bind without the reverse name look-up of http.server, which can hang."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.config.host, self.port

    def service_actions(self) -> None:
        """Called by the accepting loop, several times a second."""
        self._idle.look(*self.places.work)
        if self.places.turned_away.num_refused:
            self.places.turned_away.look()

    def server_close(self) -> None:
        """Close the socket, and those that are being turned away."""
        super().server_close()
        self.places.turned_away.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, if it gets a place."""
        if not self.places.enter(request):
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.places.leave(request)
            raise

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; its place is free then."""
        self.places.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is normal; anything else is a defect."""
        if isinstance(sys.exception(), OSError):
            logger.debug("connection ended with an error", exc_info=True)
        else:
            logger.exception("connection handler failed")
