"""The header of a safetensors file: its arrays by name, with their shapes."""

import json
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def entries(header: bytes) -> dict[str, Any]:
    """What a header says of each array."""
    found = json.loads(header)
    found.pop("__metadata__", None)
    return dict(found)


def read_entries(file: Path) -> dict[str, Any]:
    """The same of a file; of what is no such file nothing."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            return {} if length > MAX_HEADER_BYTES else entries(stream.read(length))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
