"""A look into the cache: the tree, the memory of turns, what drifts."""

from typing import Any

from sidecar.memory.conversation_memory import Forgotten
from sidecar.memory.session_turn_store import SessionView
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import Resident


class CacheService:
    """Reports on and clears the loaded models' caches. Any thread."""

    def __init__(self, pool: ResidentPool[Resident]) -> None:
        self._pool = pool

    def report(self, *, check: bool) -> dict[str, Any]:
        """
        Bytes, sessions, tree and counters.

        Args:
            check: look for broken invariants as well.
        """
        with self._pool.lease("") as resident:
            store, memory = resident.engine.store, resident.memory
            quantization = resident.engine.model.quantization
            report: dict[str, Any] = {
                "model": resident.engine.model.name,
                "bytes": store.num_bytes,
                "kv_bits": quantization.bits if quantization else None,
                "layers": store.layers,
                "needs_checkpoints": store.needs_checkpoints,
                "switched_off": list(store.switched_off),
                "selftest": resident.engine.selftest,
                "can_splice": resident.pipeline.can_splice,
                "lineage_records": len(memory.lineage),
                "sessions": [_row(view) for view in memory.turns.sessions()],
                "tree": store.rows(),
                "counters": self.counters(),
            }
            if check:
                report["problems"] = store.check_integrity()
            return report

    def drift(self) -> list[dict[str, Any]]:
        """Places where prompts part from the ones before, the dearest first."""
        with self._pool.lease("") as resident:
            return resident.pipeline.drift.rows()

    def clear(self) -> Forgotten:
        """Forget all KV, and all that explains it or could be put back."""
        with self._pool.lease("") as resident:
            return resident.memory.forget()

    def counters(self) -> dict[str, int]:
        """All cache counters; empty while no model is loaded."""
        resident = self._pool.peek()
        return resident.counters() if resident else {}


def _row(view: SessionView) -> dict[str, Any]:
    return {
        "session": view.session,
        "threads": view.num_threads,
        "messages": view.num_messages,
        "tokens": view.num_tokens,
        "idle_s": round(view.idle_s, 1),
        "parents": view.parents,
    }
