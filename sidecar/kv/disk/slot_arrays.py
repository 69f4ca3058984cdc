"""
One slot's arrays: read by mlx straight into place, and checked beside that.

The file is open from the beginning, so it can be read to its end even if it is deleted
meanwhile. Checksums are made by threads of their own: reading is not what they wait
for.
"""

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from sidecar.kv.disk.slot import Slot
from sidecar.kv.disk.tensor_file import Damaged

_BITS = {mx.bfloat16: mx.uint16}  # what NumPy has no word for
_sums = ThreadPoolExecutor(2, "kv-crc32")


@dataclass(eq=False)
class OpenSlot:
    """
    An open slot. The disk's thread only.

    Args:
        arrays: all tensors of its file, not read yet.
    """

    slot: Slot
    arrays: dict[str, mx.array]
    _checks: list[tuple[str, "Future[int]"]] = field(default_factory=list)

    def read(self, name: str) -> mx.array:
        """
        A tensor, read; it is what was written if `check` says nothing.

        Raises:
            Damaged: it is not there.
        """
        if name not in self.arrays:
            raise Damaged(f"{name} is missing")
        array = self.arrays.pop(name)
        bits = bits_of(array)
        mx.eval(array, bits)
        data = np.asarray(bits)
        self._checks.append((name, _sums.submit(_crc32_of, data)))
        return array

    def check(self) -> None:
        """
        Wait for the checksums of all that was read.

        Raises:
            Damaged: something is not what was written.
        """
        checks, self._checks = self._checks, []
        for name, found in checks:
            if found.result() != self.slot.meta["crc32"].get(name):
                raise Damaged(f"{name} is not what was written")


def open_kv(path: Path, slot: Slot) -> OpenSlot:
    """
    Open a slot's file; nothing of it is read yet.

    Raises:
        Damaged, OSError: it cannot be.
    """
    try:
        arrays = mx.load(str(path), format="safetensors", stream=mx.cpu)
    except RuntimeError as error:
        raise Damaged(f"mlx does not take it: {error}") from error
    assert isinstance(arrays, dict)
    return OpenSlot(slot, arrays)


def bits_of(array: mx.array) -> mx.array:
    """The same bytes, of a type that NumPy knows; not computed yet."""
    bits = _BITS.get(array.dtype)
    return array.view(bits, stream=mx.cpu) if bits is not None else array


def _crc32_of(data: np.ndarray) -> int:
    return zlib.crc32(memoryview(data.reshape(-1)).cast("B")) if data.size else 0
