"""Whose conversations are forgotten, and what was begun before."""

from collections import deque
from dataclasses import dataclass

from sidecar.core.prompt import Scope

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

    def covers(self, scope: Scope | None) -> bool:
        """Whether a conversation is among them; nobody's is not."""
        if scope is None:
            return False
        is_session = self.session is None or self.session == scope.session
        return is_session and (self.any_key or self.api_key == scope.api_key)


class Epochs:
    """
    Numbers the times between forgettings. Not thread-safe: its owner locks.

    What was begun in an epoch leaves nothing behind if it was forgotten since.
    """

    def __init__(self) -> None:
        self.now = 0
        self._ended: deque[tuple[int, Whose | None]] = deque(maxlen=_MOST)

    def end(self, whose: Whose | None) -> None:
        """Forget; None: everybody's."""
        self._ended.append((self.now, whose))
        self.now += 1

    def is_current(self, epoch: int, scope: Scope | None) -> bool:
        """Whether nothing of a conversation was forgotten since an epoch."""
        since = [whose for number, whose in self._ended if number >= epoch]
        if len(since) < self.now - epoch:
            return False
        return not any(whose is None or whose.covers(scope) for whose in since)
