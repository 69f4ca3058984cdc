"""What all models of a process share."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.engine.batch_loop import ExtraProcessors
from sidecar.engine.download_progress import DownloadProgress
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.process_memory import Admission, ProcessMemory
from sidecar.infra.metrics import Metrics
from sidecar.kv.disk.kv_disk import KVDisk
from sidecar.kv.kv_budget import KVBudget
from sidecar.residents.kept_memories import KeptMemories
from sidecar.volatile.rules import RuleSet

if TYPE_CHECKING:  # of the extra `vision`
    from sidecar.images.reader import ImageIntake


@dataclass(frozen=True, slots=True)
class Shared:
    """
    What all models of a process share.

    Args:
        kept: of models that are not loaded.
        rules: of volatile values. extra_processors: the test harness's.
        disk: for KV that outlives the process; None: there is none.
        image_intake: gives the one of all models, made when it is first asked for.
    """

    gpu: GpuThread
    process: ProcessMemory
    admission: Admission
    stored: KVBudget
    kept: KeptMemories
    metrics: Metrics
    download: DownloadProgress
    rules: RuleSet
    extra_processors: ExtraProcessors
    disk: KVDisk | None
    image_intake: "functools._lru_cache_wrapper[ImageIntake]"
