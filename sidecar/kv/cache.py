"""
The KV cache of one loaded model: what is held of a prompt, in memory and on the disk.

A request looks up each form of its prompt, and gets a `Hit` for it. It restores the hit
of the form that it chose, and reserves what memory has of it until it has ended, so
that what it will reuse is not evicted while it waits. If the disk fails, the prompt
stays as it is, and what memory has of it is reused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sidecar.core.conversation import Conversation, unknown
from sidecar.core.prompt import Hit, ModelIds, ModelPrompt
from sidecar.kv.prefix_store import PrefixStore

if TYPE_CHECKING:  # it is given, not made here
    from sidecar.kv.disk.disk_cache import DiskCache


@dataclass(frozen=True, slots=True)
class KVCache:
    """
    Both places where KV is held. Any thread.

    Args:
        disk: None: nothing of this model is kept there.
    """

    store: PrefixStore
    disk: "DiskCache | None" = None

    def lookup(self, ids: ModelIds, conversation: Conversation) -> Hit:
        """Say what is held of a prompt; nothing is changed."""
        held = self.store.lookup(ids, conversation.salt)
        if self.disk is None:
            return held
        return self.disk.lookup(ids, conversation.salt, held)

    def restore(
        self, prompt: ModelPrompt, hit: Hit, is_wanted: Callable[[], bool]
    ) -> Hit:
        """
        Bring what the disk has of a prompt into memory, as far as its hit says.

        Args:
            is_wanted: whether the client is still there.
        Returns:
            The hit as it is now: of what memory has, if the disk's did not come.
        """
        if self.disk is None or not hit.disk_len:
            return hit
        conversation = prompt.conversation or unknown(self.store.generation)
        if self.disk.restore(prompt.reusable_ids, conversation, hit, is_wanted):
            return replace(hit, restore_s=0.0)
        return self.store.lookup(prompt.reusable_ids, prompt.salt)

    @contextmanager
    def reserved(self, prompt: ModelPrompt) -> Iterator[None]:
        """Evict what memory has of a prompt only if nothing else is left."""
        reservation = self.store.reserve(prompt.reusable_ids, prompt.salt)
        try:
            yield
        finally:
            self.store.end_reservation(reservation)
