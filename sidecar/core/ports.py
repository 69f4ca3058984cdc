"""
Protocols between layers: what a wire format and a KV store have to offer.

A wire format is a folder of `dialects/` whose `Dialect` gets a row in the router; a
kind of model is an engine. If either needs a change elsewhere, the seam is wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sidecar.core.conversation import Conversation, ForgetFilter
from sidecar.core.errors import SidecarError
from sidecar.core.events import Event, Usage
from sidecar.core.requests import ChatRequest


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


class RunningAnswer(Protocol):
    """An answer on its way, as whoever sends it knows it."""

    def events(self) -> Iterator[Event]:
        """What is sent, Finished last."""

    def close(self) -> None:
        """Free everything; idempotent."""


class RunningChat(RunningAnswer, Protocol):
    """That of a chat."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What its client may want to know before the first token."""

    @property
    def usage(self) -> Usage:
        """What is known of it before the first token."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """
    What comes with a body.

    Args:
        headers: names in lower case.
        sender: short id of the key it came with; None: there is none.
        is_batch: it comes from a batch, which nobody waits for.
        address: where it came from; "": no connection.
    """

    request_id: str
    path: str
    headers: Mapping[str, str]
    sender: str | None = None
    is_batch: bool = False
    address: str = ""


class Call(Protocol):
    """One chat request in one wire format: what it asks, and how that is answered."""

    @property
    def chat(self) -> ChatRequest:
        """What is asked; `is_streamed` says which of the two answers is wanted."""

    def encoder(self) -> StreamEncoder:
        """For an answer that is written as it comes."""

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer as one object; the last event is Finished."""


class Dialect(Protocol):
    """One wire format for chats; pure, no sockets."""

    def parse(self, body: Any, facts: RequestFacts) -> Call:
        """
        Check a body.

        Raises:
            SidecarError: naming the field.
        """

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        """An error on its routes: content type and body."""


class KVStore(Protocol):
    """
    Where a model's KV is, for who holds none of it. Any thread.

    A generation ends when something is forgotten: what was begun before, of whoever it
    was forgotten, gets nothing any more, and leaves nothing.
    """

    @property
    def generation(self) -> int:
        """How often something was forgotten."""

    def new_generation(self, forget_filter: ForgetFilter | None) -> None:
        """
        Begin another; what is stored is still there until it is cleared.

        Args:
            forget_filter: conversations that are forgotten; None: all.
        """

    def is_current(self, conversation: Conversation) -> bool:
        """Whether nothing of a conversation was forgotten since its request began."""
