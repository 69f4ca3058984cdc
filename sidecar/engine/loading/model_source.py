"""MODEL_PATH -> the folder of a model: built in, given, or fetched from the hub."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.loading import model_place
from sidecar.engine.loading.checkpoint_files import (
    MemoryLimit,
    config_fault,
    memory_fault,
    names_fault,
)
from sidecar.engine.loading.download_progress import DownloadProgress
from sidecar.engine.loading.hub_download import Checks, fetch_snapshot
from sidecar.engine.loading.hub_faults import HubFault
from sidecar.engine.loading.model_place import ModelSource


def find_model(
    path: str | None,
    progress: DownloadProgress | None = None,
    limit: MemoryLimit | None = None,
) -> ModelSource:
    """
    Find a model's folder, downloading what is not here, and check what it holds.

    Not on the GPU thread: it may take hours.

    Args:
        path: a folder, a hub id, or None for the built-in model.
        limit: what its weights may take in memory.
    Raises:
        ModelLoadFailed: with the reason and what to do.
    """
    folder = model_place.folder_of(path)
    try:
        if folder is None:
            folder = _fetch(path or "", progress, limit)
        fault = model_place.files_fault(folder, limit, knows_architecture)
        if fault is None:
            return ModelSource(model_place.model_name(path), folder)
    except HubFault as error:
        fault = str(error)
    raise ModelLoadFailed(model_place.load_fault(path, fault))


def knows_architecture(config: Mapping[str, Any]) -> bool:
    """Whether a library here can build what a config.json describes; imports none."""
    kind = config["model_type"]
    if isinstance(config.get("vision_config"), Mapping) and _sees(kind):
        return True
    if any(kind == known for known, _ in MODEL_ARCHITECTURE_REMAPPING):
        return True
    try:
        module = f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}"
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _sees(kind: str) -> bool:
    """Whether mlx-vlm, the extra `vision`, has an architecture."""
    library = importlib.util.find_spec("mlx_vlm")
    if library is None or library.origin is None:
        return False
    folders = Path(library.origin).parent / "models"
    if (folders / kind).is_dir():
        return True
    from mlx_vlm.utils import MODEL_REMAPPING as OTHER_NAMES  # takes seconds

    return kind in OTHER_NAMES


def _fetch(
    path: str, progress: DownloadProgress | None, limit: MemoryLimit | None
) -> Path:
    if fault := model_place.absent_fault(path):
        raise HubFault(fault)

    def listing_fault(names: Sequence[str], num_bytes: int) -> str | None:
        fault = names_fault(names)
        if fault is None and limit is not None:
            return memory_fault(num_bytes, limit)
        return fault

    checks = Checks(
        listing_fault, lambda folder: config_fault(folder, knows_architecture)
    )
    return fetch_snapshot(path, checks, progress or DownloadProgress(lambda line: None))
