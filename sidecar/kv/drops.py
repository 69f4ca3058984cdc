"""What KV was let go lately, why and whose: so that a cold prompt can be explained."""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from sidecar.core.conversation import Conversation, ForgetFilter

_MAX_DROPS = 256

Reason = Literal["evicted", "expired"]


@dataclass(frozen=True, slots=True)
class Drop:
    """
    A part of a path that was let go.

    Args:
        users: sessions with prompts that it was a part of.
        end: how deep it reached, in tokens.
        limit: the setting that it was over.
        at: Unix seconds.
    """

    reason: Reason
    users: tuple[Conversation, ...]
    end: int
    limit: str
    at: float


class Drops:
    """The last 256 drops. Its owner's lock guards it."""

    def __init__(self) -> None:
        self._last: deque[Drop] = deque(maxlen=_MAX_DROPS)

    def note(
        self,
        reason: Reason,
        users: Collection[Conversation],
        end: int,
        limit: str,
    ) -> None:
        """Remember that KV that reached to a depth has been let go."""
        self._last.append(Drop(reason, tuple(users), end, limit, time.time()))

    def find(self, conversation: Conversation, depth: int) -> Drop | None:
        """The last drop of a session's KV that reached deeper than so many tokens."""
        for drop in reversed(self._last):
            if drop.end > depth and any(
                user.session_key == conversation.session_key for user in drop.users
            ):
                return drop
        return None

    def forget(self, forget_filter: ForgetFilter | None) -> None:
        """Forget whose KV it was, of everybody or of some conversations."""
        kept = [
            drop
            for drop in self._last
            if forget_filter is not None
            and not any(map(forget_filter.covers, drop.users))
        ]
        self._last = deque(kept, maxlen=_MAX_DROPS)
