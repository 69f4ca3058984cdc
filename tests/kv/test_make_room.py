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
