"""What all models of a process share: GPU thread, memory, stored KV, disk, metrics."""

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.device_memory import WiredMemory
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.loading.download_progress import DownloadProgress
from sidecar.engine.process_memory import Admission, ProcessMemory
from sidecar.engine.scheduler import ExtraProcessors
from sidecar.engine.selftest.proved_models import ProvedModels
from sidecar.infra.metrics import Metrics
from sidecar.kv.disk.kv_disk import KVDisk
from sidecar.kv.eviction import KVBudget
from sidecar.memory.tombstones import Tombstones
from sidecar.residents.capability_record import CapabilityRecords
from sidecar.residents.kept_memories import KeptMemories
from sidecar.volatile.rules import RuleSet

if TYPE_CHECKING:  # of the extra `vision`
    from sidecar.images.reader import ImageIntake


_MAX_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class Shared:
    """
    What all models of a process share.

    Args:
        kept: of models that are not loaded. tombstones: of all.
        rules: of volatile values. proved: what is known of models on this machine.
        capabilities: what they were found to be able to do.
        extra_processors: the test harness's.
        disk: for KV that outlives the process; None: there is none.
        image_intake: gives the one of all models, made when it is first asked for.
    """

    gpu: GpuThread
    process: ProcessMemory
    wired: WiredMemory
    admission: Admission
    stored: KVBudget
    kept: KeptMemories
    tombstones: Tombstones
    metrics: Metrics
    download: DownloadProgress
    rules: RuleSet
    proved: ProvedModels
    capabilities: CapabilityRecords
    extra_processors: ExtraProcessors
    disk: KVDisk | None
    image_intake: "functools._lru_cache_wrapper[ImageIntake]"

    def note_loaded(self, name: str, num_bytes: int, started: float) -> float:
        """
        Count a model among those that are loaded.

        Args:
            num_bytes: of its weights. started: when its load began (time.monotonic).
        Returns:
            The seconds it took.
        """
        seconds = time.monotonic() - started
        self.metrics.model_load_s.observe(seconds)
        self.metrics.model_bytes.labels(name).set(num_bytes)
        self.gpu.call(lambda: self.wired.note(name, num_bytes))
        return seconds

    def note_left(self, name: str) -> None:
        """A model's weights are gone."""
        self.gpu.call(lambda: self.wired.note(name, 0))
        self.gpu.call(self.process.sample)
        self.metrics.model_bytes.remove(name)


def not_loaded(name: str, folder: Path, error: BaseException) -> ModelLoadFailed:
    """What a library says of a load that failed, without a path of this machine."""
    reason = str(error).strip().replace(str(folder), name)[:_MAX_REASON]
    shown_reason = reason or type(error).__name__
    return ModelLoadFailed(f"model {name} cannot be loaded: {shown_reason}")
