"""Which keys a token sees through a window, against places counted one by one."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from sidecar.kv.window_layers import NUM_FIRST, WindowKVCache, windowed

SIZE = 12


def fed(places: list[int]) -> tuple[mx.array, mx.array]:
    """Keys and values that say which place they are of."""
    array = mx.array(places, mx.float32).reshape(1, 1, -1, 1)
    return array, array


def full_window() -> WindowKVCache:
    plain = KVCache()
    plain.update_and_fetch(*fed([*range(SIZE)]))
    [layer] = windowed([plain])
    assert isinstance(layer, WindowKVCache)
    return layer


def seen(layer: WindowKVCache, places: list[int], own: int | None) -> list[set[int]]:
    """The places that each of the next tokens sees, once they are written."""
    mask = layer.make_mask(len(places), window_size=own)
    keys = np.array(layer.update_and_fetch(*fed(places))[0]).reshape(-1).astype(int)
    if mask is None or isinstance(mask, str):
        rows = [keys <= place for place in places]
    else:
        rows = list(np.array(mask).reshape(len(places), -1))
    return [{int(key) for key in keys[row]} for row in rows]


def expected(place: int, own: int | None) -> set[int]:
    first = set(range(min(NUM_FIRST, place + 1)))
    last = set(range(max(0, place - (SIZE - NUM_FIRST) + 1), place + 1))
    far = -1 if own is None else place - own
    return {key for key in first | last if key > far}


@pytest.mark.parametrize("own", [None, 3, SIZE - 4, SIZE - 2, SIZE, 40])
@pytest.mark.parametrize(
    "lengths", [[1] * 30, [30], [2, 1, 1, 5, 1, 14, 1], [SIZE, SIZE, 1, 1], [11, 13, 1]]
)
def test_each_token_sees_the_first_and_the_last(
    lengths: list[int], own: int | None
) -> None:
    """However the tokens are cut into chunks, and through a model's own window."""
    layer, place = full_window(), SIZE
    for length in lengths:
        places = [*range(place, place + length)]
        assert seen(layer, places, own) == [expected(at, own) for at in places]
        place += length


def test_what_it_was_made_of_stays_as_it_was() -> None:
    """The arrays are shared until one is written to."""
    plain = KVCache()
    plain.update_and_fetch(*fed([*range(SIZE)]))
    before = np.array(plain.state[0])
    [layer] = windowed([plain])
    for place in range(SIZE, 3 * SIZE):
        layer.update_and_fetch(*fed([place]))
    assert np.array_equal(np.array(plain.state[0]), before)
    again = windowed([plain])[0]
    plain.update_and_fetch(*fed([99]))
    assert 99 not in np.array(again.keys)
