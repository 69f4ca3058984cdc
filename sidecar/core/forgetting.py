"""Whose conversations are forgotten, and what was begun before."""

from collections import deque
from dataclasses import dataclass

from sidecar.core.conversation import Conversation

_MOST = 256  # forgettings by name; beyond, nothing that was begun before is kept


@dataclass(frozen=True, slots=True)
class Whose:
    """
    Conversations by whose they are.

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
        return is_session and (self.any_key or self.api_key == conversation.tenant)


class Generations:
    """
    Numbers the times between forgettings. Not thread-safe: its owner locks.

    What was begun in a generation leaves nothing behind if it was forgotten since.
    """

    def __init__(self) -> None:
        self.now = 0
        self._ended: deque[tuple[int, Whose | None]] = deque(maxlen=_MOST)

    def end(self, whose: Whose | None) -> None:
        """Forget; None: everybody's."""
        self._ended.append((self.now, whose))
        self.now += 1

    def is_current(self, conversation: Conversation) -> bool:
        """Whether nothing of a conversation was forgotten since its request began."""
        began = conversation.generation
        since = [whose for number, whose in self._ended if number >= began]
        if len(since) < self.now - began:
            return False
        return not any(whose is None or whose.covers(conversation) for whose in since)
