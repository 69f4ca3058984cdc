"""The seams between layers."""

from typing import Protocol

from sidecar.core.errors import SidecarError
from sidecar.core.events import Event, Usage


class StreamEncoder(Protocol):
    """
    One streamed response in one wire format: events in, bytes out.

    The server writes what it returns and adds nothing; b"" writes nothing.
    """

    def started(self, usage: Usage) -> bytes:
        """The first bytes, at admission; `usage` is what the plan says."""

    def event(self, event: Event) -> bytes:
        """What an event comes to; Finished ends the response."""

    def ping(self) -> bytes:
        """What is sent after a long silence."""

    def failed(self, error: SidecarError) -> bytes:
        """The last bytes of a response that broke off."""
