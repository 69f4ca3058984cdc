"""What is served, and whether it can answer."""

from dataclasses import dataclass, replace

from sidecar.engine.download_progress import DownloadProgress, DownloadState
from sidecar.engine.gpu_thread import GpuThread
from sidecar.residents.pool import ModelEntry, ResidentPool
from sidecar.residents.resident import Resident


@dataclass(frozen=True, slots=True)
class Health:
    """
    `ok` can answer; `downloading` and `loading` will; `failed`, `dead`, `stuck` not;
    `draining` ends what it has begun.

    The launcher restarts a sidecar that stays unwell, and waits while it downloads.

    Args:
        memory_limit_bytes: of the process, once a model is loaded.
        failed_tests: of those at its load; what failed is not used, or is told wrong.
    """

    status: str
    models: tuple[ModelEntry, ...]
    download: DownloadState | None = None
    memory_limit_bytes: int | None = None
    failed_tests: tuple[str, ...] = ()


class ModelService:
    """Lists models and reports health. Any thread."""

    def __init__(
        self,
        pool: ResidentPool[Resident],
        gpu: GpuThread,
        longest_step_s: float,
        download: DownloadProgress,
    ) -> None:
        self._pool = pool
        self._gpu = gpu
        self._longest_step_s = longest_step_s
        self._download = download

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
        if (download := self._download.state) and states != {"loaded"}:
            return Health("downloading", entries, download)
        if self._pool.is_draining:
            return Health("draining", entries)
        status = "ok" if states == {"loaded"} else "loading"
        return self._with_engine(Health(status, entries))

    def _with_engine(self, health: Health) -> Health:
        """With what is known once a model is loaded."""
        resident = self._pool.peek()
        if resident is None:
            return health
        engine = resident.engine
        return replace(
            health,
            memory_limit_bytes=engine.guard.limit_bytes,
            failed_tests=engine.failed_tests,
        )
