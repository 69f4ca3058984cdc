"""What images take is counted before it is allocated, and told before it is awaited."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from sidecar.app import App
from sidecar.engine.memory_model import TowerCost
from sidecar.engine.process_memory import NOTHING, Demand
from sidecar.engine.selftest.image_runs import sample_image
from testkit.pictures import data_url, picture
from testkit.servers import running_sidecar

Json = dict[str, Any]


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(folder / "seeing")}) as app:
        yield app


def shown(seed: int, side: int = 448) -> list[Json]:
    part = {
        "type": "image_url",
        "image_url": {"url": data_url(picture(seed, side, side))},
    }
    return [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]


def test_images_are_looked_at_one_after_another() -> None:
    """The largest tower's peak, all that they give."""
    cost = TowerCost(per_id=10.0, per_pair=1.0, kept=4.0, id_s=0.5)
    assert cost.peak_bytes(10) == int(1.1 * 200)
    assert cost.demand([10, 20]) == Demand(120, cost.peak_bytes(20))
    assert cost.demand([]) == NOTHING


def test_what_is_measured_at_load_holds_for_a_larger_one(app: App) -> None:
    """A tower takes no more than was foretold, and not a tenth of it either."""
    with app.pool.lease("default") as model:
        vision_encoder, tower = (
            model.engine.model.vision_encoder,
            model.engine.guard.tower,
        )
        assert vision_encoder is not None
        assert tower is not None
        image = sample_image(vision_encoder, 3, (640, 640))

        def peak() -> int:
            for _ in range(2):
                mx.clear_cache()
                mx.reset_peak_memory()
                before = mx.get_active_memory()
                vision_encoder.model.image_features(image, vision_encoder.pad)
            return mx.get_peak_memory() - before

        told = tower.peak_bytes(len(image.read_ids))
        assert told / 10 < app.gpu.call(peak) <= told
        assert tower.id_s > 0


def test_one_that_does_not_fit_is_refused_and_nothing_is_left(app: App) -> None:
    """Naming its share; a text of that length is answered."""
    with app.pool.lease("default") as model:
        guard = model.engine.guard
        process, limit = guard.process, guard.process.limit_bytes
        text = guard.model.demand(2000)
        runs = model.engine.model.vision_encoder.memo.num_runs
        try:
            process.limit_bytes = mx.get_active_memory() + text.total
            app.gpu.call(process.sample)
            refused = post(app, shown(1, 1400))
            assert refused.status_code == 503
            assert "of them for its images)" in refused.json()["detail"]
            assert post(app, [{"role": "user", "content": "word " * 500}]).is_success
        finally:
            process.limit_bytes = limit
            app.gpu.call(process.sample)
        assert model.engine.model.vision_encoder.memo.num_runs == runs
    assert post(app, shown(1, 1400)).is_success


def test_the_forecast_counts_what_is_to_be_looked_at(app: App) -> None:
    """Once it was seen, no more."""
    url = f"{app.url}/v1/cache/probe"
    with app.pool.lease("default") as model:
        tower = model.engine.guard.tower
        assert tower is not None

    def foretold() -> tuple[float, int]:
        told = httpx.post(url, json={"messages": shown(7)}, timeout=60).json()
        return told["predicted_ttft_s"], told["prompt_tokens"] - told["cached_tokens"]

    (before, _), _ = foretold(), post(app, shown(7))
    assert before >= tower.id_s * 100
    after, left = foretold()
    assert left < 10
    assert after < before


def post(app: App, messages: list[Json]) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 4}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
