"""A slot's first part, where all its layers can be cut: what others go on from."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from sidecar.kv.disk.cache_form import RUN_FORMAT, metadata_of, scalar_array, to_numpy
from sidecar.kv.disk.durable_files import make_durable, open_private
from sidecar.kv.disk.slot import Slot, sum_of_bytes
from sidecar.kv.disk.slot_folder import Draft, SlotFolder
from sidecar.kv.disk.tensor_file import (
    Damaged,
    Header,
    TensorSpec,
    read_header,
    read_tensor,
    write_tensors,
)


def cut_kv(folder: SlotFolder, slot: Slot, end: int) -> tuple[Draft, dict[str, Any]]:
    """
    Write the KV of a slot's first part; hold the folder's lock.

    Args:
        end: depth behind its last token, inside the slot.
    Returns:
        A draft that holds it; what of the slot's meta is another then.
    Raises:
        Damaged: it cannot be cut, or is not what was written. OSError: of the disk.
    """
    keep, draft = end - slot.at, folder.draft()
    runs = set(itertools.chain.from_iterable(slot.meta["runs"]))
    scalars = {**slot.meta["scalars"], **dict.fromkeys(_offsets(slot), keep)}
    metadata = (
        {"format": RUN_FORMAT} if slot.parent
        else metadata_of(tuple(slot.meta["classes"]), scalars)
    )  # fmt: skip
    try:
        with folder.file(slot.number, "cache").open("rb") as kv:
            header = read_header(kv)
            if header.places.keys() - runs - scalars.keys():
                raise Damaged("some of its layers cannot be cut")
            specs = [_cut(spec, keep, runs) for spec, _ in header.places.values()]
            with open_private(draft.paths["cache"]) as file:
                arrays = _arrays(kv, header, slot, (keep, runs, scalars))
                sums = write_tensors(file, specs, metadata, arrays)
                make_durable(file)
                draft.num_bytes = file.tell()
    except BaseException:
        draft.discard()
        raise
    return draft, {"end": end, "crc32": sums, "scalars": scalars,
                   "bytes": draft.num_bytes}  # fmt: skip


def _offsets(slot: Slot) -> Iterator[str]:
    """Names of the numbers of tokens of the runs (cache_form)."""
    for run in slot.meta["runs"]:
        if run:
            yield run[0].rsplit(".", 1 if len(run) == 2 else 2)[0] + ".2"


def _cut(spec: TensorSpec, keep: int, runs: set[str]) -> TensorSpec:
    if spec.name not in runs:
        return spec
    return TensorSpec(spec.name, spec.dtype, (*spec.shape[:-2], keep, spec.shape[-1]))


def _arrays(
    kv: BinaryIO,
    header: Header,
    slot: Slot,
    what: tuple[int, set[str], Mapping[str, Any]],
) -> Iterator[np.ndarray]:
    keep, runs, scalars = what
    for name in header.places:
        if name not in runs:
            yield to_numpy(scalar_array(scalars[name]))
            continue
        array = read_tensor(kv, header, name)
        if sum_of_bytes(array) != slot.meta["crc32"][name]:
            raise Damaged(f"{name} is not what was written")
        yield array[..., :keep, :]
