"""
KV and turns of models whose weights were unloaded, kept for their next load.

KV outlives weights: a switch to another model and back costs a load, not a prefill. It
stays under the limits of all KV, goes by score like any other, and is taken up again by
a model of the same key.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sidecar.core.conversation import ForgetFilter
from sidecar.kv.prefix_store import PrefixStore
from sidecar.memory.conversation_memory import ConversationMemory, Forgotten

_MAX = 16  # models; their turns and lineage are not under the limits of KV


@dataclass(frozen=True, slots=True)
class KeptModel:
    """
    One model's KV, and all that explains it.

    Args:
        tested: how each way of reuse went in its test, as of the last load.
    """

    store: PrefixStore
    memory: ConversationMemory
    tested: Mapping[str, str] = field(default_factory=dict)


class KeptMemories:
    """By model key, borrowed by loaded models; all can be forgotten. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, KeptModel] = OrderedDict()
        self._borrowed: list[KeptModel] = []

    def borrow(self, key: str, make: Callable[[], KeptModel]) -> KeptModel:
        """What was kept of a model that is loaded again, or something new."""
        with self._lock:
            kept = self._kept.pop(key, None) or make()
            self._borrowed.append(kept)
        return kept

    def keep(self, key: str, borrowed: KeptModel, tested: Mapping[str, str]) -> None:
        """Keep what a model leaves; the one that left longest ago may go for it."""
        borrowed.store.detach()
        with self._lock:
            self._borrowed = [
                other for other in self._borrowed if other is not borrowed
            ]
            gone = [self._kept.pop(key)] if key in self._kept else []
            self._kept[key] = replace(borrowed, tested=tested)
            if len(self._kept) > _MAX:
                gone.append(self._kept.popitem(last=False)[1])
        for kept in gone:
            _forget(kept)

    def drop(self, borrowed: KeptModel) -> None:
        """Forget what a model leaves."""
        with self._lock:
            self._borrowed = [
                other for other in self._borrowed if other is not borrowed
            ]
        _forget(borrowed)

    def forget(self, forget_filter: ForgetFilter | None = None) -> Forgotten:
        """Forget all of it, or some conversations, what is borrowed too."""
        with self._lock:
            gone, borrowed = list(self._kept.values()), list(self._borrowed)
            if forget_filter is None:
                self._kept.clear()
            else:
                gone, borrowed = [], [*gone, *borrowed]
        found = [
            *map(_forget, gone),
            *(kept.memory.forget(forget_filter) for kept in borrowed),
        ]
        return sum(found, Forgotten())


def _forget(kept: KeptModel) -> Forgotten:
    gone = kept.memory.forget()
    kept.store.leave()
    return gone
