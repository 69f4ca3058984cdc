"""A prompt computed in chunks, with caches of its own."""

from collections.abc import Callable, Generator, Sequence

import mlx.core as mx

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv.kv_layers import KVLayers, evaluate


def compute_in_chunks(
    model: LoadedModel,
    ids: Sequence[int],
    cache: KVLayers,
    chunk_len: int,
    check: Callable[[], None],
) -> Generator[None, None, None]:
    """
    Fill a cache with a prompt; GPU thread only, others go on at each yield.

    Args:
        check: raises if nobody waits any more; called before each chunk.
    """
    for start in range(0, len(ids), chunk_len):
        check()
        model.forward(mx.array([ids[start : start + chunk_len]]), cache)
        evaluate(cache)
        yield
