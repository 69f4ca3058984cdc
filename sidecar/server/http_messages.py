"""An HTTP request and response as endpoints have them; writes event streams."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sidecar.core.errors import BadRequest, SidecarError
from sidecar.core.events import Event, Idle, Loading, PrefillProgress, Usage
from sidecar.core.json_bytes import dump_bytes, load_bytes
from sidecar.core.ports import RequestFacts, RunningAnswer, RunningChat, StreamEncoder
from sidecar.server import access

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """
    One HTTP request, read whole.

    Args:
        headers: names in lower case.
        tail: what the route's pattern left of the path, e.g. the id of a cancel.
        is_connected: whether the client is still there; cheap.
        is_batch: it comes from a batch of `batch_owner`, not over a connection.
        address: where its connection comes from; "": it has none.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    request_id: str
    tail: str = ""
    query: str = ""
    is_connected: Callable[[], bool] = lambda: True
    is_batch: bool = False
    batch_owner: str | None = None
    address: str = ""

    @property
    def sender(self) -> str | None:
        """A name for the key that it came with; None: with none."""
        return self.batch_owner if self.is_batch else access.key_id(self.headers)

    def json(self) -> Any:
        """
        The body as JSON.

        Raises:
            BadRequest: it is not.
        """
        try:
            return load_bytes(self.body)
        except ValueError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventStream:
    """
    A response that is written as it comes.

    Args:
        encoder: makes bytes of the events.
        events: what the encoder knows, Idle for an idle moment. SidecarError ends it.
        close: called once, however it ends.
        usage: what is known before the first event.
        content_type: of what the encoder makes.
    """

    encoder: StreamEncoder
    events: Iterator[Any]
    close: Callable[[], None]
    usage: Usage = Usage(0, 0, 0, 0)
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "text/event-stream; charset=utf-8"


Endpoint = Callable[[Request], Response | EventStream]


class Router(Protocol):
    """Which endpoint answers what."""

    def find(self, method: str, path: str) -> tuple[Endpoint, str]:
        """The endpoint, and what its pattern left of the path."""

    def is_urgent(self, path: str) -> bool:
        """Whether it is answered though all places are taken."""

    def name(self, path: str) -> str:
        """A route's name for metrics: of a bounded set."""

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, Any]:
        """An error in the shape of its route: content type and body."""


def facts_of(request: Request) -> RequestFacts:
    """What comes with a body."""
    return RequestFacts(
        request.request_id,
        request.path,
        request.headers,
        request.sender,
        is_batch=request.is_batch,
        address=request.address,
    )


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(dump_bytes(body), status, headers=headers or {})


def problem_response(error: SidecarError, content_type: str, body: Any) -> Response:
    """An error as the whole response."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status_hint == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(dump_bytes(body), error.status_hint, content_type, headers)


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
            if isinstance(event, Loading):
                self._send(b": loading the model: %s\n\n" % event.step.encode())
            elif isinstance(event, PrefillProgress):
                self._send(stream.encoder.event(event) or _comment(event))
            elif not isinstance(event, Idle):
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


def _comment(event: PrefillProgress) -> bytes:
    return b": prefill %s\n\n" % dump_bytes(event.as_json())


def streamed(encoder: StreamEncoder, running: RunningChat) -> EventStream:
    """An answer that is written as it comes."""
    return EventStream(
        encoder,
        running.events(),
        running.close,
        running.usage,
        running.headers,
    )


def collect(running: RunningAnswer, request: Request) -> list[Event]:
    """All events of a generation, as long as the client is there."""
    try:
        return list(_while_connected(running, request.is_connected))
    finally:
        running.close()


def _while_connected(
    running: RunningAnswer, is_connected: Callable[[], bool]
) -> Iterator[Event]:
    for event in running.events():
        if not is_connected():
            raise ConnectionResetError("the client closed the connection")
        if not isinstance(event, Idle):
            yield event
