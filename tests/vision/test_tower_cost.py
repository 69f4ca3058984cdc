"""What a tower takes is measured in short turns: streams of other models go on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.core.prompt import SeenImage
from sidecar.engine.selftest.runs import Runs
from sidecar.engine.selftest.tower_cost import fit_tower
from sidecar.engine.vision.vision_encoder import SeeingModel, VisionEncoder
from testkit.servers import running_sidecar


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(folder / "seeing")}) as app:
        yield app


def eyes_of(app: App) -> VisionEncoder:
    with app.pool.lease("default") as model:
        vision_encoder: VisionEncoder = model.engine.model.vision_encoder
        return vision_encoder


@pytest.mark.parametrize(("first_s", "largest"), [(0.005, 448), (0.1, 224), (2, 160)])
def test_the_slower_the_device_the_smaller_the_second_picture(
    app: App, monkeypatch: pytest.MonkeyPatch, first_s: float, largest: int
) -> None:
    """A look at 448 pixels took up to 6 s on a CPU, and is one turn of the thread."""
    seen, now = list[tuple[int, int]](), 0.0
    look = SeeingModel.image_features

    def slow(model: SeeingModel, image: SeenImage, pad: int) -> Any:
        nonlocal now
        now += first_s
        seen.append(image.size)
        return look(model, image, pad)

    monkeypatch.setattr(SeeingModel, "image_features", slow)
    app.gpu.call_in_steps(fit_tower(eyes_of(app), lambda: now))
    assert seen == [(128, 96)] * 2 + [(largest, largest)] * 2


def test_a_turn_of_the_self_test_is_one_computation(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at an image, or a pass of the language model: not both in one turn."""
    done = list[str]()
    embedded, forward = SeeingModel.embedded, SeeingModel.__call__

    def look(model: SeeingModel, *asked: Any) -> Any:
        done.append("look")
        return embedded(model, *asked)

    def compute(model: SeeingModel, *asked: Any, **named: Any) -> Any:
        done.append("pass")
        return forward(model, *asked, **named)

    monkeypatch.setattr(SeeingModel, "embedded", look)
    monkeypatch.setattr(SeeingModel, "__call__", compute)
    with app.pool.lease("default") as model:
        steps = dict(Runs(model.engine.model).paths())["images"]()
    turns = list[list[str]]()
    while app.gpu.call(lambda: next(steps, "end")) != "end":
        turns.append(done[:])
        done.clear()
    assert sum(turn == ["look"] for turn in turns) == 3
    assert all(turn == ["look"] for turn in turns if "look" in turn)
