"""What is served, and whether it can answer."""

from dataclasses import dataclass

from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.pool import EnginePool, ModelEntry
from sidecar.service.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Health:
    """
    `ok` can answer; `loading` soon will; `failed`, `dead` and `stuck` will not.

    The launcher restarts a sidecar that stays unwell.
    """

    status: str
    models: tuple[ModelEntry, ...]


class ModelService:
    """Lists models and reports health. Any thread."""

    def __init__(
        self, pool: EnginePool[ServedModel], gpu: GpuThread, longest_step_s: float
    ) -> None:
        self._pool = pool
        self._gpu = gpu
        self._longest_step_s = longest_step_s

    def entries(self) -> tuple[ModelEntry, ...]:
        """All served models."""
        return self._pool.entries()

    def health(self) -> Health:
        """The state of the whole server; cheap, and never waits for the GPU."""
        entries = self._pool.entries()
        states = {entry.state for entry in entries}
        if not self._gpu.is_alive:
            return Health("dead", entries)
        if self._gpu.step_s > self._longest_step_s:
            return Health("stuck", entries)
        if "failed" in states:
            return Health("failed", entries)
        return Health("ok" if states == {"loaded"} else "loading", entries)
