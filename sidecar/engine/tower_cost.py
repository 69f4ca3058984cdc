"""What a vision tower takes, measured on two pictures when its model is loaded."""

import time
from collections.abc import Generator

import mlx.core as mx
import numpy as np

from sidecar.engine.memory_model import TowerCost
from sidecar.engine.self_test_images import sample_image
from sidecar.engine.vision import Eyes
from sidecar.kv.kv_layers import give_back_freed

_SIZES = ((96, 128), (448, 448))  # height, width


def fit_tower(eyes: Eyes) -> Generator[None, None, TowerCost]:
    """Look at two pictures of noise, each twice; a turn of the GPU thread each."""
    rows, costs = list[list[float]](), list[int]()
    seconds = kept = 0.0
    for size in _SIZES:
        image = sample_image(eyes, 1, size)
        count = len(image.read_ids)
        for _ in range(2):  # the first one compiles
            mx.reset_peak_memory()
            before, started = mx.get_active_memory(), time.perf_counter()
            features = eyes.model.image_features(image, eyes.pad)
            seconds = (time.perf_counter() - started) / count
            kept = features.num_bytes / count
            del features
            yield
        rows.append([count, count**2])
        costs.append(max(0, mx.get_peak_memory() - before))
    give_back_freed()
    found = np.linalg.lstsq(np.array(rows), np.array(costs, float), rcond=None)[0]
    per_id, per_pair = (float(value) for value in found)
    if min(per_id, per_pair) < 0:  # noise: as if all grew with the number of ids
        per_id, per_pair = max(c / r[0] for r, c in zip(rows, costs, strict=True)), 0.0
    return TowerCost(per_id, per_pair, kept, seconds)
