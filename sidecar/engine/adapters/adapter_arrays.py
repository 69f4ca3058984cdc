"""
The arrays of a safetensors file that is in memory, as float32.

MLX reads a file object lazily, on a thread of its own that then needs the interpreter;
while the GPU thread gives freed memory back it holds that and waits for all of MLX's
threads (0.32, CPU): the process would stand still. So nothing is left to be read.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sidecar.infra.safetensors_header import MAX_HEADER_BYTES, entries

_LENGTH_BYTES = 8
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_DIMENSIONS = 8


def safetensors_arrays(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """
    Each array by its name.

    Raises:
        ValueError: it is no whole file, or has other numbers than floats.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if len(data) < _LENGTH_BYTES or length > MAX_HEADER_BYTES or begin > len(data):
        raise ValueError("its weights cannot be read: the file is cut off")
    try:
        found = entries(data[_LENGTH_BYTES:begin])
    except (ValueError, AttributeError, TypeError, RecursionError):
        why = "its weights cannot be read: the header is no JSON object"
        raise ValueError(why) from None
    body = memoryview(data)[begin:]
    for name, entry in found.items():
        yield name, _array(name, entry, body)


def _array(name: str, entry: Any, body: memoryview) -> np.ndarray:
    said = f"its weights cannot be read: {name[:100]}"
    if not isinstance(entry, dict):
        raise ValueError(f"{said} is not described")
    kind = _TYPES.get(str(entry.get("dtype")))
    if kind is None:
        raise ValueError(f"{said} has numbers of type {str(entry.get('dtype'))[:20]}")
    shape = _sizes(entry.get("shape"))
    begin, end = (*_sizes(entry.get("data_offsets")), 0, 0)[:2]
    if end > len(body) or end - begin != math.prod(shape) * np.dtype(kind).itemsize:
        raise ValueError(f"{said} is cut off")
    flat = np.frombuffer(body[begin:end], kind)
    if entry["dtype"] == "BF16":  # the upper half of a float32
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32).reshape(shape)


def _sizes(value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and len(value) <= _MAX_DIMENSIONS
    if not is_list or not all(type(one) is int and one >= 0 for one in value):
        raise ValueError("its weights cannot be read: an array has no shape or place")
    return tuple(value)
