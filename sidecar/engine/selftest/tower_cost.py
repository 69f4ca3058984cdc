"""What a vision tower takes, measured on two pictures when its model is loaded."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from sidecar.core.prompt import SeenImage
from sidecar.engine.memory_model import TowerCost
from sidecar.engine.selftest.image_runs import sample_image
from sidecar.engine.vision.vision_encoder import VisionEncoder
from sidecar.kv.kv_layers import release_freed_memory

_FIRST = (96, 128)  # height, width
# The largest that takes no longer: a look is one turn, and streams wait for its end. On
# a GPU it is the largest of all; on a CPU that one took 3 to 6 s.
_SECOND = ((448, 448), (320, 320), (224, 224), (160, 160))
_MAX_S = 1.0
_EXPONENT = 1.5  # of a look's time by pixels: embedding is linear, attention square


@dataclass(frozen=True, slots=True)
class _Encoding:
    """What a look at a picture took: its peak, what stays of it, seconds."""

    num_ids: int
    peak_bytes: int
    kept_bytes: int
    seconds: float


def fit_tower(
    vision_encoder: VisionEncoder, clock: Callable[[], float] = time.perf_counter
) -> Generator[None, None, TowerCost]:
    """
    Look at two pictures of noise, each twice; a turn of the GPU thread each.

    Args:
        clock: seconds. For tests.
    """
    first = yield from _encode(vision_encoder, _FIRST, clock)
    size = _second_size(first.seconds)
    second = yield from _encode(vision_encoder, size, clock)
    release_freed_memory()
    rows = [[look.num_ids, look.num_ids**2] for look in (first, second)]
    costs = [look.peak_bytes for look in (first, second)]
    found = np.linalg.lstsq(np.array(rows), np.array(costs, float), rcond=None)[0]
    per_id, per_pair = (float(value) for value in found)
    if min(per_id, per_pair) < 0:  # noise: as if all grew with the number of ids
        per_id, per_pair = max(c / r[0] for r, c in zip(rows, costs, strict=True)), 0.0
    count = second.num_ids
    return TowerCost(
        per_id, per_pair, second.kept_bytes / count, second.seconds / count
    )


def _second_size(first_s: float) -> tuple[int, int]:
    """The largest whose look is expected to be short, after one of `_FIRST`."""
    for height, width in _SECOND:
        growth = height * width / (_FIRST[0] * _FIRST[1])
        if first_s * growth**_EXPONENT <= _MAX_S:
            return height, width
    return _SECOND[-1]


def _encode(
    vision_encoder: VisionEncoder, size: tuple[int, int], clock: Callable[[], float]
) -> Generator[None, None, _Encoding]:
    image = sample_image(vision_encoder, 1, size)
    yield from _timed_encoding(vision_encoder, image, clock)  # the first one compiles
    return (yield from _timed_encoding(vision_encoder, image, clock))


def _timed_encoding(
    vision_encoder: VisionEncoder, image: SeenImage, clock: Callable[[], float]
) -> Generator[None, None, _Encoding]:
    """One look; all is read before the turn ends, and others use the memory."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before, started = mx.get_active_memory(), clock()
    features = vision_encoder.model.image_features(image, vision_encoder.pad)
    seconds, peak = clock() - started, mx.get_peak_memory()
    found = _Encoding(
        len(image.read_ids), max(0, peak - before), features.num_bytes, seconds
    )
    del features
    yield
    return found
