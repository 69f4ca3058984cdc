"""What an endpoint gets and gives back."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.errors import BadRequest, SidecarError
from sidecar.core.events import Event, Usage
from sidecar.core.json_bytes import dump_bytes, load_bytes
from sidecar.core.ports import StreamEncoder

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """
    One HTTP request, read whole.

    Args:
        headers: names in lower case.
        tail: what the route's pattern left of the path, e.g. the id of a cancel.
        is_connected: whether the client is still there; cheap.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    request_id: str
    tail: str = ""
    query: str = ""
    is_connected: Callable[[], bool] = lambda: True

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
        events: with Idle for an idle moment. SidecarError ends it.
        close: called once, however it ends.
        usage: what is known before the first event.
    """

    encoder: StreamEncoder
    events: Iterator[Event]
    close: Callable[[], None]
    usage: Usage = Usage(0, 0, 0, 0)
    headers: Mapping[str, str] = field(default_factory=dict)


Endpoint = Callable[[Request], Response | EventStream]


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
