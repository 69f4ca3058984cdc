"""
An adapter that becomes part of its model: of a kind that no bank can hold.

DoRA scales what it changes, the matrices of experts are one for each expert, and a full
fine-tuning replaces weights. A model that has read one is another model: its KV, turns
and slots have a key of their own. mlx-lm's own loader reads it.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from sidecar.core.errors import BadRequest
from sidecar.engine.adapters.adapter_files import (
    CONFIG,
    WEIGHTS,
    adapter_in,
    described,
    stat_of,
)
from sidecar.engine.loading.checkpoint_files import safetensors_fault
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.weights import weights_nbytes
from sidecar.infra.safetensors_header import read_entries

_KINDS = ("lora", "dora", "full")
_TRIED = [1, 2, 3]  # ids that every vocabulary has


def is_for_a_model(folder: Path) -> bool:
    """
    Whether a folder's adapter cannot be a row of a bank.

    Raises:
        OSError, ValueError: it cannot be served at all; says why.
    """
    kind = described(folder, _KINDS).kind
    stat_of(folder / WEIGHTS)  # a pipe would be waited for, for good
    if kind != "lora":
        return True
    shapes = (entry.get("shape") for entry in read_entries(folder / WEIGHTS).values())
    return any(isinstance(shape, list) and len(shape) > 2 for shape in shapes)


def own_folder(path: str) -> Path:
    """The folder that a model's `adapter_path` names."""
    return Path(os.path.expanduser(path))  # unlike Path's, it takes an unknown user


def why_not(folder: Path) -> str:
    """Why the adapter of a folder cannot be a model's own by its files; "": it can."""
    try:
        if not is_for_a_model(folder):
            adapter_in(folder)
        return safetensors_fault(folder / WEIGHTS) or ""
    except BadRequest as error:
        return error.message
    except OSError as error:
        return f"{error.strerror}: {Path(error.filename or CONFIG).name}"
    except (ValueError, RecursionError) as error:
        return str(error)


def applied(model: LoadedModel, folder: Path) -> LoadedModel:
    """
    The model with an adapter as part of it; GPU thread only.

    Raises:
        ValueError, KeyError, OSError: it does not fit; the model is to be let go.
    """
    from mlx_lm.tuner.utils import load_adapters  # 30 ms that few starts need

    network: Any = model.model
    if not hasattr(network, "layers"):  # as mlx-vlm has read it
        network = network.language_model
    files = [folder / CONFIG, folder / WEIGHTS]
    found = [_identity(file) for file in files]
    load_adapters(network, str(folder))
    network.eval()
    mx.eval(network.parameters())
    digest = _digest(files)
    if found != [_identity(file) for file in files]:
        raise OSError("its files have changed while they were read")
    read = set(read_entries(folder / WEIGHTS))
    if not all(
        bool(mx.isfinite(array).all().item())
        for name, array in tree_flatten(network.parameters())
        if name in read and mx.issubdtype(array.dtype, mx.floating)
    ):
        raise ValueError("the adapter's weights are no numbers")
    logits = model.forward(mx.array([_TRIED]), model.new_cache(), None, ())
    if not bool(mx.isfinite(logits).all().item()):
        raise ValueError("what the model says with the adapter is no number")
    return replace(
        model,
        key=f"{model.key}+{digest}",
        num_bytes=weights_nbytes(model.model),
        applied=folder.name,
        applied_digest=digest,
    )


def _identity(file: Path) -> tuple[int, ...]:
    found = stat_of(file)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(files: Sequence[Path]) -> str:
    """Of what it is, not of when it was written."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]
