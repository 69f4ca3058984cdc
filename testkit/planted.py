"""Faults planted into the reuse of KV, each of a kind that has really happened."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv import kv_layers
from sidecar.kv.disk.slot_reader import SlotReader
from sidecar.kv.kv_layers import KVLayers, Leaves

_BLOCK = 16


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by what `make` makes of it."""
    original = owner.__dict__[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def shifted_layer() -> Iterator[None]:
    """The KV of the first layer that is put together lies one position too far."""

    def shift(arrays: Leaves) -> Leaves:
        return [mx.roll(a, 1, axis=-2) for a in arrays]

    with _first_layer(shift):
        yield


@contextlib.contextmanager
def foreign_block() -> Iterator[None]:
    """One block of a layer is another prompt's: here, what stands behind it."""

    def replace(arrays: Leaves) -> Leaves:
        found = []
        for a in arrays:
            parts = a[..., :_BLOCK, :], a[..., 2 * _BLOCK : 3 * _BLOCK, :]
            found.append(mx.concatenate([*parts, a[..., 2 * _BLOCK :, :]], axis=-2))
        return found

    with _first_layer(replace):
        yield


@contextlib.contextmanager
def offset_off_by_one() -> Iterator[None]:
    """A row that joins a batch believes that it is one token longer."""
    insert = kv_layers._insert

    def wrong(layer: Any) -> Any:
        batch = insert(layer)
        batch.offset = batch.offset + 1
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_layers, "_insert", wrong)
        yield


@contextlib.contextmanager
def stale_checkpoint() -> Iterator[None]:
    """Each checkpoint is the one before, of another depth or prompt."""
    take, taken = kv_layers.take_checkpoint, []

    def previous(cache: KVLayers) -> list[Any]:
        taken.append(take(cache))
        return copy.deepcopy(taken[-2] if len(taken) > 1 else taken[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_layers, "take_checkpoint", previous)
        yield


@contextlib.contextmanager
def shifted_slot() -> Iterator[None]:
    """What was read of the disk is whole, and handed over one position too far."""

    def shift(joined: Callable[..., Leaves]) -> Callable[..., Leaves]:
        return lambda *told: [mx.roll(a, 1, axis=-2) for a in joined(*told)]

    with patched(SlotReader, "_joined", shift):
        yield


@contextlib.contextmanager
def _first_layer(change: Any) -> Iterator[None]:
    rebuild = kv_layers.rebuild

    def wrong(
        fresh: KVLayers, arrays: Sequence[Leaves], rest: Sequence[Any], offset: int
    ) -> None:
        rebuild(fresh, [change(arrays[0]), *arrays[1:]], rest, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_layers, "rebuild", wrong)
        yield


@contextlib.contextmanager
def looks_ahead() -> Iterator[None]:
    """What stands behind in a chunk changes what stands before it."""
    forward = LoadedModel.forward

    def mixed(self: LoadedModel, ids: mx.array, cache: Any, *more: Any) -> mx.array:
        return forward(self, (ids + ids.shape[1] // 4) % 997, cache, *more)

    LoadedModel.forward = mixed  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoadedModel.forward = forward  # type: ignore[method-assign]
