"""
The conversation of a request: made with its prompt, and handed along whole.

Conversations can be forgotten, by session or by key: what they left is deleted, and
what was begun before leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

IMPLICIT = "implicit-"  # begins the ids of sessions that no client named
_MAX_FORGETTINGS = 256  # by name; beyond, nothing begun before is kept


_ADAPTER = "\x1fadapter:"  # no key's id has such a character


def with_adapter(tenant: str | None, digest: str) -> str:
    """A tenant's name for what is read with an adapter: nothing of it is shared."""
    return f"{tenant or ''}{_ADAPTER}{digest}"


def key_of(tenant: str | None) -> str | None:
    """The id of the API key in a tenant's name; None: it sends none."""
    return (tenant or "").partition(_ADAPTER)[0] or None


@dataclass(frozen=True, slots=True)
class Conversation:
    """
    A thread of a client's session, and how the request at hand continues it.

    Two are equal if they are the same thread of the same session of the same tenant.
    The fields behind those describe one request, and do not count.

    Args:
        tenant: the id of the client's API key; None: it sends none. What is read with
            an adapter is that of another tenant (`with_adapter`).
        session: as the client named it, or as it was made here.
        thread: the conversation within the session (memory/session_turn_store).
        is_known: False for what no client asked, such as a self-test: no forgetting
            of somebody's conversations covers it.
        resembles: the thread whose words the request repeats, where nothing else tells
            which one it goes on with. Many people say equal words: its record gives
            what says nothing of who asks, and nothing is written under it.
        salt: names the prefix tree that holds its KV. That is the tenant's own tree,
            or "", where tenants share one.
        generation: the number of forgettings when the request began. What has been
            forgotten since leaves nothing behind.
        is_subagent: another thread of the session is its main one.
        proved_until: the index of the message up to which it is known to be this
            thread: the last one with an id that was issued in it. Whoever begins with
            the same words and ids may go on behind that as somebody else.
        is_batch: the request comes from a batch: what is kept of it is the first to go.
        own_len: tokens up to the end of the first turn that the model wrote for it; 0:
            none is known. What parts from its path behind them is an older end of it.
    """

    tenant: str | None = None
    session: str = ""
    thread: str = ""
    is_known: bool = True
    resembles: Conversation | None = field(default=None, compare=False)
    salt: str = field(default="", compare=False)
    generation: int = field(default=0, compare=False)
    is_subagent: bool = field(default=False, compare=False)
    is_batch: bool = field(default=False, compare=False)
    proved_until: int = field(default=sys.maxsize, compare=False)
    own_len: int = field(default=0, compare=False)

    @property
    def is_named(self) -> bool:
        """Whether the client's own word says that the request belongs to it."""
        return self.proved_until == sys.maxsize

    @property
    def session_key(self) -> tuple[str | None, str] | None:
        """Its tenant and session, whatever the thread; None: no client's."""
        return (self.tenant, self.session) if self.is_known else None

    def as_json(self) -> list[str | None] | None:
        """What of it is kept in a file."""
        return [self.tenant, self.session, self.thread] if self.is_known else None


def unknown(generation: int) -> Conversation:
    """A conversation of no client."""
    return Conversation(is_known=False, generation=generation)


def conversation_of(kept: object) -> Conversation:
    """
    A conversation from a file.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(kept, list):
        raise TypeError("a conversation is a list")
    tenant, session, thread = kept
    if not (isinstance(session, str) and isinstance(thread, str)):
        raise TypeError("a session and a thread are names")
    if not isinstance(tenant, str | None):
        raise TypeError("a tenant is a name")
    return Conversation(tenant, session, thread)


def is_implicit(session: str) -> bool:
    """Whether a session id was made here."""
    return session.startswith(IMPLICIT)


@dataclass(frozen=True, slots=True)
class ForgetFilter:
    """
    Conversations by key and session.

    Args:
        session: as the client named it, or as it was made here; None: any.
        api_key: the id of a client's key (ClientInfo); None: of clients without one.
        any_key: whatever the key is.
    """

    session: str | None = None
    api_key: str | None = None
    any_key: bool = False

    def covers(self, conversation: Conversation) -> bool:
        """Whether a conversation is among them; what is no client's is not."""
        if not conversation.is_known:
            return False
        is_session = self.session is None or self.session == conversation.session
        is_key = self.any_key or self.api_key == key_of(conversation.tenant)
        return is_session and is_key


class Generations:
    """
    Numbers the times between forgettings. Not thread-safe: its owner locks.

    What was begun in a generation leaves nothing behind if it was forgotten since.
    """

    def __init__(self) -> None:
        self.now = 0
        self._ended: deque[tuple[int, ForgetFilter | None]] = deque(
            maxlen=_MAX_FORGETTINGS
        )

    def end(self, forget_filter: ForgetFilter | None) -> None:
        """Forget; None: everybody's."""
        self._ended.append((self.now, forget_filter))
        self.now += 1

    def is_current(self, conversation: Conversation) -> bool:
        """Whether nothing of a conversation was forgotten since its request began."""
        began = conversation.generation
        since = [
            forget_filter for number, forget_filter in self._ended if number >= began
        ]
        if len(since) < self.now - began:
            return False
        return not any(
            forget_filter is None or forget_filter.covers(conversation)
            for forget_filter in since
        )
