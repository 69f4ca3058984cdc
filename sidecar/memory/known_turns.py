"""Turns as the model wrote them, and where; and who asks for one again."""

import hashlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sidecar.core.conversation import Conversation
from sidecar.memory.tombstones import Context, PlaceKeys, Scopes, place_keys
from sidecar.volatile.marked_message import SpanKey


@dataclass(frozen=True, slots=True)
class Healed:
    """
    A turn as the model wrote it.

    Args:
        header: the assistant header it was written behind.
        vanishing: what its prompt said last and the client does not keep: the
            canonical context that it stood behind, its text.
        raw_ids: what followed that header: the rest of the generation prompt and the
            sampled ids, without the stop token.
        raw_text: those ids as text. reasoning: what the client was sent of it.
        lead: the rest of the generation prompt, with which they begin.
        digest: a short name, equal for equal ids.
    """

    header: str
    raw_ids: tuple[int, ...]
    raw_text: str
    reasoning: str
    vanishing: tuple[str, str] | None = None
    lead: str = ""
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Each request that has the turn asks for its digest, twice."""
        digest = hashlib.sha256(array("I", self.raw_ids)).hexdigest()[:32]
        object.__setattr__(self, "digest", digest)


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """
    A turn, where it was said, and to whom.

    Args:
        visible: the hash of what its client saw of it.
        values: those that identify who asks, where and what, in its request.
        as_sent: whether its prompt said no more than the request did: else the model
            has read values of earlier requests, and may speak of them.
        time: when it was said, by the clock of the tombstones; 0: nobody knows.
        alike: digest of the first turn of its chat that looks like it; "": it is that.
        behind: the turns that stood in its prompt (pipeline/reuse/healed_history).
    """

    visible: str
    context: Context
    conversation: Conversation
    healed: Healed
    values: Mapping[SpanKey, str] = field(default_factory=dict)
    as_sent: bool = True
    time: int = field(default=0, compare=False)
    alike: str = field(default="", compare=False)
    behind: bytes = field(default=b"", compare=False)
    keys: PlaceKeys = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Each request that has the turn asks for the names of its place."""
        keys = place_keys(self.visible, self.context, self.conversation)
        object.__setattr__(self, "keys", keys)

    @property
    def num_bytes(self) -> int:
        """Bytes it takes, about."""
        values = sum(100 + 4 * len(value) for value in self.values.values())
        text = 4 * len(self.healed.raw_text)
        return 8 * len(self.healed.raw_ids) + text + values + len(self.behind) + 700


@dataclass(frozen=True, slots=True)
class Asks:
    """
    Who asks for a turn again, and where.

    Args:
        context: what stands before it in the request.
        in_thread: it is of who asks, as ids prove: nothing but its thread counts.
    """

    context: Context
    conversation: Conversation
    in_thread: bool

    def last(self, turn: KnownTurn) -> str:
        """The name of the last turn that looks like one."""
        return self._key(turn, lambda keys: keys.shown_last)

    def once(self, turn: KnownTurn) -> str:
        """The name of the only turn that looks like one."""
        return self._key(turn, lambda keys: keys.shown_once)

    def _key(self, turn: KnownTurn, names: Callable[[PlaceKeys], Scopes]) -> str:
        if self.in_thread:
            return names(turn.keys).thread
        asked = names(place_keys(turn.visible, self.context, self.conversation))
        has_sender = asked.sender and self.context.sender == turn.context.sender
        return asked.sender if has_sender else asked.session
