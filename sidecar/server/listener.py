"""The listening socket: a bounded number of connections, each with its thread."""

import http.server
import logging
import socket
import socketserver
import sys
from typing import Any

from sidecar.config.settings import ServerConfig
from sidecar.infra.metrics import Metrics
from sidecar.server.body_budget import BodyBudget
from sidecar.server.places import Places
from sidecar.server.router import Routes

logger = logging.getLogger(__name__)


class Listener(http.server.ThreadingHTTPServer):
    """A bounded number of connections, one thread each."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        config: ServerConfig,
        routes: Routes,
        metrics: Metrics,
        handler: type[socketserver.BaseRequestHandler],
    ) -> None:
        self.config = config
        self.routes = routes
        self.metrics = metrics
        self.places = Places(config.max_connections)
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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or turn it away."""
        if not self.places.enter(request):
            self._turn_away(request)
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

    def _turn_away(self, request: Any) -> None:
        body = b'{"error":{"message":"too many connections","code":"rate_limited"}}'
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            "Retry-After: 1\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            request.settimeout(0.2)
            request.sendall(head.encode() + body)
        except OSError:
            pass
        self.shutdown_request(request)
