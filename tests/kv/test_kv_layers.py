"""Surgery on mlx-lm's caches: cut, join, rebuild, checkpoint, batch form."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import KVLayers
from testkit.sequences import on_gpu, some_ids
from testkit.told_kv import digests, faults, leaf_faults, tell

WINDOW = 16
IDS = some_ids(1, 700)

MAKERS: dict[str, Callable[[], KVLayers]] = {
    "plain": lambda: [KVCache(), KVCache()],
    "quantised": lambda: [QuantizedKVCache(64, 8)],
    "rotating": lambda: [RotatingKVCache(WINDOW)],
    "recurrent": lambda: [ArraysCache(2)],
    "hybrid": lambda: [ArraysCache(2), KVCache(), ArraysCache(2)],
    "sliding": lambda: [RotatingKVCache(WINDOW), KVCache()],
    "composite": lambda: [
        CacheList(KVCache(), ArraysCache(2)),
        CacheList(RotatingKVCache(WINDOW), CacheList(KVCache())),
    ],
}
SLICEABLE = ["plain", "quantised"]
every_kind = pytest.mark.parametrize("kind", MAKERS)


def made(kind: str, length: int, step: int | None = None) -> KVLayers:
    """A cache that holds the first ids, computed in steps."""
    cache = MAKERS[kind]()
    for start in range(0, length, step or length or 1):
        tell(cache, IDS, start, min(start + (step or length), length))
    return cache


def restored(kind: str, cache: KVLayers, checkpoint: list[Any], depth: int) -> KVLayers:
    """What the store does, at its smallest."""
    arrays = [kv_layers.cut(a, 0, depth) for a in kv_layers.sliceable_leaves(cache)]
    fresh = MAKERS[kind]()
    kv_layers.rebuild(fresh, arrays, checkpoint, depth)
    return fresh


@pytest.mark.parametrize(
    ("kind", "sliceable"), [(kind, kind in SLICEABLE) for kind in MAKERS]
)
@on_gpu
def test_what_can_be_cut_is_asked_of_the_live_object(
    kind: str, sliceable: bool
) -> None:
    """A rotating cache counts as uncuttable even while it has not forgotten yet."""
    assert kv_layers.is_sliceable(MAKERS[kind]()) is sliceable
    assert kv_layers.is_sliceable(made(kind, 5)) is sliceable


@on_gpu
def test_composite_layers_are_opened_up() -> None:
    kinds = [type(atom).__name__ for atom in kv_layers.atoms(made("composite", 3))]
    assert kinds == ["KVCache", "ArraysCache", "RotatingKVCache", "KVCache"]


@every_kind
@on_gpu
def test_the_depth_is_read_from_the_layers(kind: str) -> None:
    for length in (0, 1, 5, WINDOW, 40, 300):
        wanted = None if kind == "recurrent" else length
        assert kv_layers.depth(made(kind, length)) == wanted


@on_gpu
def test_layers_that_disagree_have_no_depth() -> None:
    with pytest.raises(ValueError, match="layers hold 4 and 5 tokens"):
        kv_layers.depth([*made("plain", 4), *made("sliding", 5)])


@pytest.mark.parametrize("kind", SLICEABLE)
@given(
    length=st.integers(1, 600),
    step=st.sampled_from([1, 7, 255, 256, 257, 600]),
    cuts=st.lists(st.integers(0, 600), max_size=4),
    room=st.integers(0, 300),
)
@settings(max_examples=40)
def test_cutting_and_joining_gives_the_same_rows(
    kind: str, length: int, step: int, cuts: list[int], room: int
) -> None:
    """Any stretches, joined in order, are the KV of the ids; room is behind them."""

    @on_gpu
    def check() -> None:
        step_ = max(step, length // 8)
        arrays = kv_layers.sliceable_leaves(made(kind, length, step_))
        edges = sorted({0, length, *(c for c in cuts if c < length)})
        runs = [
            [kv_layers.cut(a, start, end) for a in arrays]
            for start, end in zip(edges, edges[1:], strict=False)
        ]
        whole = [
            kv_layers.join([run[i] for run in runs], room) for i in range(len(arrays))
        ]
        assert all(a.shape[-2] >= length + room for leaves in whole for a in leaves)
        fresh = MAKERS[kind]()
        kv_layers.rebuild(fresh, whole, [], length)
        assert faults(fresh, IDS[:length]) == []
        tell(fresh, IDS, length, length + 9)
        assert faults(fresh, IDS[: length + 9]) == []

    check()


@pytest.mark.parametrize("kind", SLICEABLE)
@on_gpu
def test_a_view_off_by_one_would_be_noticed(kind: str) -> None:
    """The told KV tells: the checks of this file are not blind."""
    cache = made(kind, 50)
    (atom, *_), (leaves, *_) = cache, kv_layers.sliceable_leaves(cache)
    for start, end, wrong in ((10, 20, False), (9, 19, True), (11, 21, True)):
        view = kv_layers.view(leaves, start, end)
        assert bool(leaf_faults(atom, view, digests(IDS)[10:20], 0)) is wrong


@on_gpu
def test_a_cut_does_not_keep_its_parent_alive() -> None:
    """A slice would: the bytes of the rest would stay taken."""
    keys = mx.ones((1, 4, 8192, 64))
    mx.eval(keys)
    before = mx.get_active_memory()
    (part,) = kv_layers.cut([keys], 4096, 8192)
    mx.eval(part)
    assert mx.get_active_memory() - before == pytest.approx(part.nbytes, rel=0.01)
    total = keys.nbytes
    del keys
    assert before + part.nbytes - mx.get_active_memory() == pytest.approx(total, 0.01)


@every_kind
@pytest.mark.parametrize("depth", [1, WINDOW - 1, WINDOW, WINDOW + 1, 40, 300])
@pytest.mark.parametrize("step", [None, 1, 11])
@on_gpu
def test_a_checkpoint_resumes_as_if_nothing_had_come_behind(
    kind: str, depth: int, step: int | None
) -> None:
    """Taken on the way, wrapped or not; the cache moves on, and it stays."""
    if step == 1 and depth > 50:
        step = 11
    cache = made(kind, depth, step)
    checkpoint = kv_layers.take_checkpoint(cache)
    tell(cache, IDS, depth, depth + 30)
    for end in range(depth + 31, depth + 35):
        tell(cache, IDS, end - 1, end)
    assert faults(cache, IDS[: depth + 34]) == []
    kv_layers.own_checkpoint(checkpoint)
    for more in (1, 2, 50):
        fresh = restored(kind, cache, checkpoint, depth)
        assert kv_layers.depth(fresh) == (None if kind == "recurrent" else depth)
        assert faults(fresh, IDS[:depth]) == []
        other = (*IDS[:depth], *some_ids(2, more))
        tell(fresh, other, depth, depth + more)
        assert faults(fresh, other) == []
    assert faults(cache, IDS[: depth + 34]) == []


@every_kind
@on_gpu
def test_a_copy_and_its_original_go_their_own_ways(kind: str) -> None:
    cache = made(kind, 40)
    twin = kv_layers.copy_layers(cache)
    one, other = (*IDS[:40], 1, 2, 3), (*IDS[:40], 7, 8, 9)
    for end in (41, 42, 43):
        tell(cache, one, end - 1, end)
        tell(twin, other, end - 1, end)
    assert faults(cache, one) == []
    assert faults(twin, other) == []


@on_gpu
def test_an_owned_checkpoint_frees_what_it_was_a_slice_of() -> None:
    """Rows extracted from a batch, say: their state must not keep the batch."""
    big = mx.ones((64, 4096))
    mx.eval(big)
    state = ArraysCache(1)
    state[0] = big[3:4]
    mx.eval(state[0])
    before = mx.get_active_memory()
    kv_layers.own_checkpoint([state])
    size = big.nbytes
    del big
    assert before - mx.get_active_memory() == pytest.approx(size, rel=0.05)
    assert kv_layers.checkpoint_nbytes([state]) == 4096 * 4


@on_gpu
def test_the_bytes_are_those_of_the_arrays() -> None:
    cache = made("composite", 40)
    arrays = kv_layers.sliceable_leaves(cache)
    plain = [a for a in kv_layers.atoms(cache) if type(a) is KVCache]
    assert kv_layers.nbytes(arrays) == sum(atom.nbytes for atom in plain)
    kept = kv_layers.take_checkpoint(cache)
    assert kv_layers.checkpoint_nbytes(kept) == sum(atom.nbytes for atom in kept)


BATCHED = ["plain", "rotating", "recurrent", "hybrid", "sliding", "composite"]


@pytest.mark.parametrize("kind", BATCHED)
@pytest.mark.parametrize("length", [1, WINDOW, 40, 256])
@on_gpu
def test_a_batch_of_one_row_gives_back_what_joined(kind: str, length: int) -> None:
    """Also after steps in the batch, one token each."""
    batch = kv_layers.to_batch(made(kind, length))
    assert faults(kv_layers.from_only_row(batch), IDS[:length]) == []
    batch = kv_layers.to_batch(made(kind, length))
    for end in range(length + 1, length + 5):
        _tell_batch(batch, end)
    assert faults(kv_layers.from_only_row(batch), IDS[: length + 4]) == []


def _tell_batch(batch: KVLayers, end: int) -> None:
    """One step of a batch of one row, by way of what a lone row would hold."""
    lone = [type(atom).__name__.replace("Batch", "") for atom in kv_layers.atoms(batch)]
    for number, (atom, name) in enumerate(
        zip(kv_layers.atoms(batch), lone, strict=True)
    ):
        told = digests(IDS[:end])
        if name == "ArraysCache":
            last = float(told[-1])
            atom.cache = [mx.full((1, 3), last), mx.full((1, 2, 2), last + number)]
        else:
            keys = mx.full((1, 2, 1, 8), float(told[-1]))
            atom.update_and_fetch(keys, keys + number + 1)


@on_gpu
def test_plain_rows_join_and_leave_without_a_copy() -> None:
    """The array objects themselves move, room and all."""
    cache = made("plain", 300)
    objects = [(layer.keys, layer.values) for layer in cache]
    batch = kv_layers.to_batch(cache)
    for layer, (keys, values) in zip(batch, objects, strict=True):
        assert layer.keys is keys
        assert layer.values is values
    for layer, (keys, values) in zip(
        kv_layers.from_only_row(batch), objects, strict=True
    ):
        assert layer.keys is keys
        assert layer.values is values
        assert layer.offset == 300


@on_gpu
def test_a_padded_row_is_extracted_without_its_padding() -> None:
    """What is left of a batch after its longer row went."""
    short, long = made("plain", 20), made("plain", 90)
    batch = [type(a).merge([a, b]) for a, b in zip(short, long, strict=True)]
    rows = [layer.extract(0) for layer in batch]
    assert faults(rows, IDS[:20]) == []
    for layer in batch:
        layer.filter([0])
    assert faults(kv_layers.from_only_row(batch), IDS[:20]) == []
