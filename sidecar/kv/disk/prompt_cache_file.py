"""Prompt caches of mlx-lm: a chain of slots written as one, one taken for a path."""

import contextlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache

from sidecar.core.conversation import unknown
from sidecar.core.prompt import ModelIds
from sidecar.kv import kv_layers
from sidecar.kv.disk.cache_form import (
    metadata_of,
    scalar_array,
    spec_of,
    to_numpy,
)
from sidecar.kv.disk.durable_files import open_private, replace_private
from sidecar.kv.disk.slot import Slot
from sidecar.kv.disk.slot_arrays import OpenSlot, bits_of
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.kv.disk.tensor_file import Damaged, write_tensors
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import Buffer


def export_chain(folder: SlotFolder, number: int, file: Path) -> int:
    """
    Write a slot, with all that it goes on from, as mlx-lm's `save_prompt_cache` would.

    Args:
        file: must not exist; its ids go to the same name with `.ids.json` behind.
    Returns:
        Tokens in it.
    Raises:
        Damaged, OSError: it cannot be read, or written.
    """
    with folder.locked(shared=True):
        chain = [folder.open(slot) for slot in chain_of(folder, number)]
    last = chain[-1].slot
    if not last.is_end:
        raise Damaged(f"slot {number} ends where its model cannot go on from")
    runs = {name: _joined(chain, name) for layer in last.meta["runs"] for name in layer}
    scalars = dict(last.meta["scalars"])
    for layer in last.meta["runs"]:
        if layer:  # how many tokens it holds: "3.0" and "3.1.0" are of layer 3
            scalars[_offset_of(layer[0], scalars)] = last.end
    arrays = {**runs, **_states(chain[-1], set(runs) | set(scalars))}
    arrays |= {name: scalar_array(value) for name, value in scalars.items()}
    for opened in chain:
        opened.check()
    specs = [spec_of(name, array) for name, array in arrays.items()]
    metadata = metadata_of(last.meta["classes"], scalars)
    try:
        with open_private(file) as out:
            data = (to_numpy(bits_of(array)) for array in arrays.values())
            write_tensors(out, specs, metadata, data)
        ids = np.concatenate([_ids(chain, index) for index in range(len(chain))])
        replace_private(Path(f"{file}.ids.json"), json.dumps(ids.tolist()).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            file.unlink()
        raise
    return last.end


def chain_of(folder: SlotFolder, number: int) -> list[Slot]:
    """
    A slot behind all that it goes on from.

    Raises:
        Damaged, OSError: one of them is not there.
    """
    chain = [folder.read(number)]
    while (parent := chain[0].parent) is not None:
        above = folder.read(parent[0])
        if above.uid != parent[1]:
            raise Damaged(f"slot {chain[0].number} goes on from one that is gone")
        chain.insert(0, above)
    return chain


def _offset_of(run: str, scalars: dict[str, Any]) -> str:
    """The name of the number of tokens, beside the first array of a layer."""
    for place in (run.rpartition(".")[0], run.rpartition(".")[0].rpartition(".")[0]):
        if f"{place}.2" in scalars:
            return f"{place}.2"
    raise Damaged(f"{run} has no length")


def _end(chain: list[OpenSlot], index: int) -> int:
    """Where the next one goes on from it."""
    return chain[index + 1].slot.at if index + 1 < len(chain) else chain[index].slot.end


def _ids(chain: list[OpenSlot], index: int) -> np.ndarray:
    slot = chain[index].slot
    return slot.ids[: _end(chain, index) - slot.at]


def _joined(chain: list[OpenSlot], name: str) -> mx.array:
    parts = []
    for index, opened in enumerate(chain):
        array = opened.read(name)
        parts.append(array[..., : _end(chain, index) - opened.slot.at, :])
    joined = mx.concatenate(parts, axis=-2, stream=mx.cpu)
    mx.eval(joined)
    return joined


def _states(opened: OpenSlot, known: set[str]) -> dict[str, mx.array]:
    names = [name for name in opened.arrays if name not in known]
    return {name: opened.read(name) for name in names}


def read_prompt_cache(store: PrefixStore, file: Path, ids: tuple[int, ...]) -> int:
    """
    Store a prompt cache of mlx-lm's under its ids; on the GPU thread.

    Args:
        ids: of all its tokens.
    Returns:
        Tokens that are stored.
    Raises:
        Damaged: it is none, or of another model.
    """
    try:
        cache: Any = load_prompt_cache(str(file))
        length = kv_layers.depth(cache) or 0
    except Exception as error:  # whatever mlx-lm says of what is none
        raise Damaged(f"{file.name} is no prompt cache: {error}") from error
    fresh = store.empty_cache(kv_layers.sliceable_leaves(cache))
    kinds = [[type(atom) for atom in kv_layers.atoms(c)] for c in (cache, fresh)]
    if kinds[0] != kinds[1]:
        raise Damaged(f"{file.name} is of another model")
    if length != len(ids):
        raise Damaged(
            f"{file.name} holds {length} tokens, and there are {len(ids)} ids"
        )
    runs = [kv_layers.cut(a, 0, length) for a in kv_layers.sliceable_leaves(cache)]
    mx.eval(runs)
    conversation, path = unknown(store.generation), ModelIds(ids)
    checkpoint = kv_layers.take_checkpoint(cache)
    if not store.insert(path, conversation, [Buffer(runs, 0, length)], checkpoint):
        raise Damaged(f"{file.name} could not be stored")
    store.on_kept(path, conversation)
    return length
