"""The self-test's way through the disk: what was stored is written, and read again."""

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sidecar.core.conversation import unknown
from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.ports import DiskSettings
from sidecar.kv.disk.root import DiskLimits, DiskRoot
from sidecar.kv.disk.slot_index import SlotIndex
from sidecar.kv.disk.slot_reader import RestoreRequest, SlotReader
from sidecar.kv.disk.slot_writer import SlotWriter
from sidecar.kv.prefix_store import PrefixStore

_SETTINGS = DiskSettings(min_tokens=1, run_tokens=1, quiet_s=0, restore="always")
_UNLIMITED = DiskLimits(1 << 40, 0, 0, 0)


class Shelf:
    """A folder of slots for one test, gone with it; GPU thread only."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="litellm-mlx-selftest-")
        self._root = DiskRoot(Path(self._place.name), _UNLIMITED)
        self._folder = self._root.folder("0" * 16, {})
        self._index = SlotIndex()

    def __enter__(self) -> "Shelf":
        return self

    def __exit__(self, *_: object) -> None:
        self._place.cleanup()

    def write(self, store: PrefixStore, ids: ModelIds) -> None:
        """Write of a prompt what is not here, as a slot that goes on from the last."""
        writer = SlotWriter(
            store, self._root, self._folder, self._index, _Silence(), _here, _SETTINGS
        )
        owner = unknown(store.generation)
        writer.write(ids, owner, lambda: contextlib.nullcontext(True), is_last=True)

    def read(self, store: PrefixStore, ids: ModelIds) -> None:
        """
        Have a store hold a prompt.

        Raises:
            ValueError: it is not here as a whole, or not as it was written.
        """
        match = self._index.match(ids, "")
        if match.depth != len(ids):
            raise ValueError(f"written {match.depth}, asked {len(ids)}")
        reader = SlotReader(store, self._folder, self._index, _here)
        wanted = RestoreRequest(
            ids, unknown(store.generation), lambda _: True, lambda: True
        )
        if not reader.restore(match, wanted):
            raise ValueError("what was written is not read again")


class _Silence:
    """Nothing was said behind made-up ids."""

    def save(
        self, ids: ModelIds, salt: str
    ) -> tuple[list[Mapping[str, Any]], np.ndarray]:
        return [], np.empty(0, np.uint32)

    def saved(self, kept: Sequence[Mapping[str, Any]]) -> None:
        pass

    def load(self, kept: Sequence[Mapping[str, Any]], canonical: np.ndarray) -> None:
        pass


def _here(work: Callable[[], Any]) -> Any:
    """A turn of the GPU thread: this is one."""
    return work()
