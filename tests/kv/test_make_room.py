"""Buffers grow before a step, and hold what they held."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, RotatingKVCache

from sidecar.kv.kv_layers import KVLayers, make_room, to_batch


def written(layer: KVCache, count: int) -> mx.array:
    """Keys that a layer is given."""
    keys = mx.random.normal((1, 2, count, 4))
    layer.update_and_fetch(keys, keys)
    return keys


def plain(count: int) -> KVCache:
    layer = KVCache()
    written(layer, count)
    return layer


@pytest.mark.parametrize("count", [1, 200, 256, 257, 511, 512])
@pytest.mark.parametrize("step", [256, 1024])
@pytest.mark.parametrize("is_batch", [False, True])
def test_there_is_room_and_nothing_else_has_changed(
    count: int, step: int, *, is_batch: bool
) -> None:
    cache: KVLayers = [plain(count), CacheList(plain(count), plain(count))]
    before = [mx.array(layer.keys) for layer in (cache[0], *cache[1].caches)]
    if is_batch:
        cache = [*to_batch(cache[:1]), CacheList(*to_batch(cache[1].caches))]
    make_room(cache, 17, step)
    for layer, keys in zip((cache[0], *cache[1].caches), before, strict=True):
        assert layer.keys.shape[2] % step == 0
        assert layer.keys.shape[2] >= count + 17
        assert mx.array_equal(layer.keys[..., :count, :], keys[..., :count, :])
        buffer = layer.keys
        make_room([layer], 17, step)
        assert layer.keys is buffer
        more = mx.random.normal((1, 2, 17, 4))
        found, _ = layer.update_and_fetch(more, more)
        assert mx.array_equal(found[..., count:, :], more)
        assert layer.keys.shape == buffer.shape


def test_layers_of_other_kinds_are_left_alone() -> None:
    empty, window = KVCache(), RotatingKVCache(8)
    written(window, 5)
    make_room([window, empty, BatchKVCache([0])], 300)
    assert empty.keys is None
    assert window.keys.shape[2] < 300


@pytest.mark.parametrize("num_layers", [1, 7, 36, 64])
@pytest.mark.parametrize("per_step", [1, 3])
def test_layers_grow_one_after_another_before_they_are_full(
    num_layers: int, per_step: int
) -> None:
    """No step copies more than its share of them, and none has to grow in a step."""
    cache = [plain(200) for _ in range(num_layers)]
    make_room(cache, per_step)
    most = 0
    for _ in range(1200 // per_step):
        before = [layer.keys for layer in cache]
        make_room(cache, per_step)
        grown = [b is not c.keys for b, c in zip(before, cache, strict=True)]
        most = max(most, sum(grown))
        for layer in cache:
            layer.offset += per_step
            assert layer.offset <= layer.keys.shape[2]
    assert 0 < most <= per_step * num_layers / 16 + 1
    assert cache[0].keys.shape[2] >= 1400
