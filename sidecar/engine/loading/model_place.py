"""What MODEL_PATH names on this machine; imports no MLX, which takes seconds."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.engine.loading.checkpoint_files import (
    KnowsArchitecture,
    MemoryLimit,
    folder_fault,
    gguf_fault,
    memory_fault,
    weight_bytes,
)

BUILTIN_DIR = Path(__file__).parents[2] / "builtin_model"
BUILTIN_NAME = "mlx-tiny-agent"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's name, and the folder that holds it whole."""

    name: str
    folder: Path


def model_name(path: str | None) -> str:
    """What a model is called: its hub id, or the name of its folder."""
    if path is None:
        return BUILTIN_NAME
    return Path(path).name if _is_place(path) else path


def folder_of(path: str | None) -> Path | None:
    """The folder that it names, None if there is none."""
    folder = BUILTIN_DIR if path is None else Path(path)
    # Unlike is_dir, this raises nothing where a folder above may not be entered.
    return folder if os.path.isdir(folder) else None


def size_of(path: str | None) -> int:
    """Bytes of its weights, 0 if they are not here."""
    folder = folder_of(path)
    return weight_bytes(folder) if folder else 0


def absent_fault(path: str) -> str | None:
    """Why what is no folder is no model; None if it may be a hub id."""
    place = Path(path)
    if os.path.exists(place):
        if place.suffix.lower() == ".gguf":
            return gguf_fault()
        return "it is a file; give the folder that holds the model"
    if "://" in path:
        hub_id = "/".join(path.partition("://")[2].split("/")[1:3])
        return f"it is an address; give the hub id alone, {hub_id}"
    if _is_place(path):
        return "there is no such folder"
    return _hub_id_fault(path) if path else None


def _hub_id_fault(path: str) -> str | None:
    from huggingface_hub.errors import HFValidationError  # few starts come here
    from huggingface_hub.utils import validate_repo_id

    from sidecar.engine.loading.hub_faults import contact_fault

    try:
        validate_repo_id(path)
    except HFValidationError as error:
        return contact_fault(error)
    return None


def files_fault(
    folder: Path, limit: MemoryLimit | None, knows: KnowsArchitecture
) -> str | None:
    """Why a folder cannot be loaded, its size included."""
    fault = folder_fault(folder, knows)
    if fault is None and limit is not None:
        return memory_fault(weight_bytes(folder), limit)
    return fault


def early_fault(path: str | None, limit: MemoryLimit | None) -> str | None:
    """Why a model on this machine cannot be loaded, whatever mlx-lm knows."""
    folder = folder_of(path)
    fault = files_fault(folder, limit, _any) if folder else absent_fault(path or "")
    return load_fault(path, fault) if fault else None


def load_fault(path: str | None, fault: str) -> str:
    """The sentence for people: which model, why not, what to do."""
    return f"model {model_name(path)} cannot be loaded: {fault}"


def _any(_config: Mapping[str, Any]) -> bool:
    return True


def _is_place(path: str) -> bool:
    """Whether it names a place on this machine rather than a model of the hub."""
    return (
        path.startswith((".", "/", "~"))
        or path.endswith((".gguf", ".safetensors"))
        or path.count("/") > 1
        or os.path.exists(path)
    )
