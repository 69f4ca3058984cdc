"""
Tensors in a safetensors file, written as a stream, with a CRC32 of each.

The header is made before the first array is there, so a file of any size is written
with the memory of one array. Nothing is mapped when it is read: a file that is cut
short is an error then, not a signal that ends the process.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

DTYPES = {  # safetensors' names -> NumPy's; it has no bfloat16, its bits are carried
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "F64": "<f8",
}
_MAX_HEADER = 64 << 20  # bytes


class Damaged(Exception):
    """A file is not what it was written as; the message says where."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, its dtype as safetensors calls it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """
    What a file says of itself.

    Args:
        places: name -> spec, offset of its first byte in the file.
        crc32: of the header's bytes. size: bytes that the whole file must have.
    """

    places: Mapping[str, tuple[TensorSpec, int]]
    metadata: Mapping[str, str]
    crc32: int
    size: int


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file of these tensors, in their order."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        table[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(
    file: BinaryIO,
    specs: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    arrays: Iterable[np.ndarray],
) -> dict[str, int]:
    """
    Write a file.

    Args:
        arrays: one for each spec, in order; taken one by one.
    Returns:
        The CRC32 of each tensor's bytes, by name.
    Raises:
        ValueError: an array is not what its spec says.
        OSError: of the disk.
    """
    file.write(header_bytes(specs, metadata))
    sums = {}
    for spec, array in zip(specs, arrays, strict=True):
        if array.nbytes != spec.num_bytes:
            raise ValueError(f"{spec.name} has {array.nbytes} bytes")
        data = memoryview(np.ascontiguousarray(array)).cast("B") if array.size else b""
        sums[spec.name] = zlib.crc32(data)
        file.write(data)
    return sums


def read_header(file: BinaryIO) -> Header:
    """
    Read and check a file's header.

    Raises:
        Damaged: it is none, or promises what is not there.
    """
    size = file.seek(0, 2)
    file.seek(0)
    begin = file.read(8)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else -1
    if not 0 < length <= min(_MAX_HEADER, size - 8):
        raise Damaged("it has no header")
    text = file.read(length)
    try:
        table = json.loads(text)
        metadata = dict(table.pop("__metadata__", {}))
        places = {name: _place(name, row, 8 + length) for name, row in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header is not one: {error}") from error
    end = max((at + spec.num_bytes for spec, at in places.values()), default=8 + length)
    if end != size:
        raise Damaged(f"it has {size} bytes, not {end}")
    return Header(places, metadata, zlib.crc32(begin + text), size)


def _place(name: str, row: Mapping[str, object], base: int) -> tuple[TensorSpec, int]:
    shape, offsets = row["shape"], row["data_offsets"]
    if not (isinstance(shape, list) and isinstance(offsets, list)):
        raise TypeError(name)
    if not all(type(n) is int and n >= 0 for n in (*shape, *offsets)):
        raise ValueError(name)
    spec = TensorSpec(name, str(row["dtype"]), tuple(shape))
    if spec.num_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{name} has other offsets than its shape")
    return spec, base + offsets[0]


def read_tensor(file: BinaryIO, header: Header, name: str) -> np.ndarray:
    """
    A tensor's values (of bfloat16 the bits).

    Raises:
        Damaged: it is not there, or no array can be like it.
    """
    if name not in header.places:
        raise Damaged(f"{name} is missing")
    spec, begin = header.places[name]
    try:
        array = np.empty(spec.shape, DTYPES[spec.dtype])
    except ValueError as error:  # none of its numbers are there, and too many are named
        raise Damaged(f"{name} has the shape {spec.shape}"[:200]) from error
    if array.size:
        data = memoryview(array.reshape(-1)).cast("B")
        file.seek(begin)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise Damaged(f"{name} is cut short")
    return array
