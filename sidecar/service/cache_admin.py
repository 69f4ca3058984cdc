"""A look into the cache: the tree, the memory of turns, what drifts."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from sidecar.core.conversation import ForgetFilter
from sidecar.core.errors import Unavailable
from sidecar.kv.disk.kv_disk import KVDisk
from sidecar.memory.conversation_memory import Forgotten
from sidecar.memory.session_turn_store import SessionView
from sidecar.residents.kept_memories import KeptMemories
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import require_text


class CacheService:
    """
    Reports on and clears the models' caches. Any thread.

    Args:
        kept: of all models, loaded or not. disk: the same, on the disk.
    """

    def __init__(
        self, pool: ResidentPool[ServedModel], kept: KeptMemories, disk: KVDisk | None
    ) -> None:
        self._pool = pool
        self._kept = kept
        self._disk = disk

    def report(self, name: str, *, check: bool) -> dict[str, Any]:
        """
        Bytes, sessions, tree and counters of one model, which is loaded for it.

        Args:
            name: of the model; "": the default one.
            check: look for broken invariants as well.
        """
        with self._pool.lease(name) as leased:
            resident = require_text(leased)
            store, memory = resident.engine.store, resident.memory
            quantization = resident.engine.model.quantization
            report: dict[str, Any] = {
                "model": resident.name,
                "loaded": [other.name for other in self._pool.loaded()],
                "bytes": store.num_bytes,
                "bytes_of_all": store.budget.num_bytes,
                "kv_bits": quantization.bits if quantization else None,
                "layers": store.layers,
                "needs_checkpoints": store.needs_checkpoints,
                "switched_off": list(store.switched_off),
                "selftest": resident.engine.outcomes,
                "can_splice": resident.pipeline.can_splice,
                "lineage_records": len(memory.lineage),
                "sessions": [_row(view) for view in memory.turns.sessions()],
                "tree": store.rows(),
                "counters": resident.counters(),
                "disk_slots": resident.disk.num_slots if resident.disk else None,
            }
            if check:
                report["problems"] = store.check_integrity()
            return report

    def drift(self, name: str) -> list[dict[str, Any]]:
        """Places where prompts part from the ones before, the dearest first."""
        with self._pool.lease(name) as leased:
            return require_text(leased).pipeline.drift.rows()

    def clear(
        self,
        name: str | None = None,
        forget_filter: ForgetFilter | None = None,
        *,
        on_disk: bool = True,
    ) -> Forgotten:
        """
        Forget KV, and all that explains it or could be put back.

        Args:
            name: of one model; None: of all, loaded or not.
            forget_filter: conversations; None: all.
            on_disk: what is kept there, too.
        Raises:
            Unavailable: what is on the disk could not be deleted.
        """
        disk = self._disk if on_disk else None
        if name is None:
            return _forget(disk, None, forget_filter, self._kept.forget)
        with self._pool.lease(name) as leased:
            resident = require_text(leased)
            return _forget(disk, resident.name, forget_filter, resident.memory.forget)

    def counters(self) -> dict[str, int]:
        """All cache counters of loaded models together; empty while there is none."""
        counts: Counter[str] = Counter()
        for resident in self._pool.loaded():
            counts.update(resident.counters())
        return dict(counts)


def _forget(
    disk: KVDisk | None,
    model: str | None,
    forget_filter: ForgetFilter | None,
    forget: Callable[[ForgetFilter | None], Forgotten],
) -> Forgotten:
    """Of the memory, and of the disk before and behind it."""
    found = []
    with contextlib.suppress(OSError):  # it is tried once more
        # Before: nothing can be restored any more.
        found += [disk.forget(model, forget_filter)] if disk else []
    gone = forget(forget_filter)
    try:
        # Behind: what was written since.
        found += [disk.forget(model, forget_filter)] if disk else []
    except OSError as error:
        raise Unavailable(
            f"what is in memory is forgotten, the disk is not: {error}"
        ) from error
    return gone + Forgotten(
        num_slots=sum(slots for slots, _ in found),
        disk_bytes=sum(num_bytes for _, num_bytes in found),
    )


def _row(view: SessionView) -> dict[str, Any]:
    return {
        "session": view.session,
        "key": view.api_key,
        "threads": view.num_threads,
        "messages": view.num_messages,
        "tokens": view.num_tokens,
        "idle_s": round(view.idle_s, 1),
        "parents": view.parents,
    }
