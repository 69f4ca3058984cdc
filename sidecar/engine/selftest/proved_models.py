"""
What this machine has measured and proved of models: a start need not wait for it.

It hangs on what the arithmetic hangs on: the model's configuration, its weight files
(their times, and samples of their bytes), the versions of the libraries, the device,
and how KV is quantised. A record says which ways of reuse have passed their tests, and
what memory prompts take.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.model_identity import (
    platform_parts,
    small_files,
    weight_identities,
)
from sidecar.engine.memory_model import MemoryModel, TowerCost
from sidecar.kv.disk.record_file import RecordFile

_VERSION = 6
_MAX_RECORDS = 64


@dataclass(frozen=True, slots=True)
class ProvedModel:
    """
    What is known of a model on this machine.

    Args:
        memory: what its prompts take. token_s: seconds to compute one of their tokens.
        tower: what its images take; None: it takes none.
        passed: ways of reuse whose tests have passed (engine/selftest/self_test).
    """

    memory: MemoryModel
    token_s: float
    tower: TowerCost | None = None
    passed: Sequence[str] = field(default=())


class ProvedModels:
    """
    The records of one file. Any thread of one process; of two the last write stays.

    Args:
        file: where they are kept; None: nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        self._records = RecordFile(file, _MAX_RECORDS)

    def find(self, key: str) -> ProvedModel | None:
        """The record of a model; None: there is none, or it cannot be read."""
        record = self._records.find(key)
        with contextlib.suppress(TypeError, KeyError, ValueError, AttributeError):
            if record is not None:
                return _parsed(record)
        return None

    def keep(self, key: str, record: ProvedModel) -> None:
        """Remember a model."""
        self._records.keep(key, asdict(record))

    def drop(self, key: str) -> None:
        """Forget a model."""
        self._records.drop(key)


def key_of(model: LoadedModel, step_size: int) -> str:
    """
    A name for all that a record hangs on.

    Args:
        step_size: of a prefill chunk.
    Raises:
        OSError: the model's files cannot be read.
    """
    parts = {
        "version": _VERSION,
        "weights": weight_identities(model.folder),
        "files": list(small_files(model.folder)),
        "step": step_size,
        **platform_parts(model),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _parsed(record: Mapping[str, Any]) -> ProvedModel:
    """
    A record as it was kept.

    Raises:
        TypeError, KeyError, ValueError: it is none; a number is no size or time.
    """
    memory, tower, passed = record["memory"], record["tower"], record["passed"]
    _check_sizes([record["token_s"], *memory.values(), *(tower or {}).values()])
    if not isinstance(passed, list) or not all(isinstance(p, str) for p in passed):
        raise TypeError("passed must be names")
    return ProvedModel(
        MemoryModel(**memory),
        record["token_s"],
        TowerCost(**tower) if tower else None,
        tuple(passed),
    )


def _check_sizes(values: Sequence[object]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError("a size must be a number")
        if not 0 <= value < math.inf:
            raise ValueError(f"a size must be a finite number from 0, got {value}")
