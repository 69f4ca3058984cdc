"""Opens the disk cache of a loaded text model, with all that it needs of the engine."""

import logging
from collections.abc import Callable, Generator
from typing import Any

from sidecar.engine.loading.model_identity import WeightDigests, identity_of
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.disk.disk_cache import DiskCache
from sidecar.kv.disk.ports import Machine
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.residents.kept_memories import KeptModel
from sidecar.residents.shared import Shared

logger = logging.getLogger(__name__)


def open_disk(shared: Shared, engine: TextEngine, kept: KeptModel) -> DiskCache | None:
    """Know again what the disk holds of a model; None: nothing is kept there."""
    disk, model, memory = shared.disk, engine.model, kept.memory
    if disk is None or not disk.is_usable:
        return None
    digests = WeightDigests(disk.digests_file)

    def find_folder() -> SlotFolder:
        key, description = identity_of(model, digests)
        return disk.root.folder(key, description)

    def turn(work: Callable[[], Any]) -> Any:
        def steps() -> Generator[None, None, Any]:
            yield
            return work()

        return shared.gpu.call_in_steps(steps(), is_background=False)

    machine = Machine(
        disk.thread,
        turn,
        shared.process.relieve,
        lambda: engine.token_s,
        lambda: shared.admission.num_open == 0,
    )
    cache = DiskCache(
        kept.store,
        disk.root,
        find_folder,
        memory,
        machine,
        disk.settings,
        model.name,
    )
    disk.opened(cache)
    cache.open(at_once=digests.are_known(model.folder))
    return cache
