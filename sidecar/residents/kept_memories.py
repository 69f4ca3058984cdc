"""
What conversations left of models that are not loaded now.

KV outlives weights: a switch to another model and back costs a load, not a prefill. It
stays under the limits of all KV, goes by score like any other, and is taken up again by
a model of the same key.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from sidecar.kv.prefix_store import PrefixStore
from sidecar.memory.conversation_memory import ConversationMemory, Forgotten

_MOST = 16  # models; their turns and lineage are not under the limits of KV


@dataclass(frozen=True, slots=True)
class Kept:
    """
    One model's KV, and all that explains it.

    Args:
        tested: how each way of reuse went in its test, as of the last load.
    """

    store: PrefixStore
    memory: ConversationMemory
    tested: Mapping[str, str] = field(default_factory=dict)


class KeptMemories:
    """By model key. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def take(self, key: str) -> Kept | None:
        """What was kept of a model that is loaded again."""
        with self._lock:
            return self._kept.pop(key, None)

    def keep(self, key: str, kept: Kept) -> None:
        """Keep what a model leaves; the one that left longest ago may go for it."""
        kept.store.detach()
        with self._lock:
            self._kept[key] = kept
            gone = (
                self._kept.popitem(last=False)[1] if len(self._kept) > _MOST else None
            )
        if gone is not None:
            _forget(gone)

    def forget(self) -> Forgotten:
        """Forget all of it."""
        with self._lock:
            gone = list(self._kept.values())
            self._kept.clear()
        found = [_forget(kept) for kept in gone]
        return Forgotten(
            sum(f.kv_bytes for f in found),
            sum(f.num_prompts for f in found),
            sum(f.num_threads for f in found),
        )


def _forget(kept: Kept) -> Forgotten:
    gone = kept.memory.forget()
    kept.store.leave()
    return gone
