"""A running generation as a response: streamed, or collected while somebody waits."""

from collections.abc import Callable, Iterator

from sidecar.core.events import Event, Idle
from sidecar.core.ports import StreamEncoder
from sidecar.server.messages import EventStream, Request
from sidecar.service.completion import CompletionRun
from sidecar.service.generation import Generation


def streamed(encoder: StreamEncoder, running: Generation) -> EventStream:
    """An answer that is written as it comes."""
    return EventStream(
        encoder,
        running.events(),
        running.close,
        running.planned_usage,
        running.headers,
    )


def collect(running: Generation | CompletionRun, request: Request) -> list[Event]:
    """All events of a generation, as long as the client is there."""
    try:
        return list(_while_connected(running, request.is_connected))
    finally:
        running.close()


def _while_connected(
    running: Generation | CompletionRun, is_connected: Callable[[], bool]
) -> Iterator[Event]:
    for event in running.events():
        if not is_connected():
            raise ConnectionResetError("the client closed the connection")
        if not isinstance(event, Idle):
            yield event
