"""A model whose images read themselves: all of a prompt with them is one pass (V6)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from testkit.image_chats import (
    WORDS,
    Json,
    ask,
    assert_same,
    cached,
    forget,
    said,
    user,
    values,
)  # fmt: skip
from testkit.pictures import image_part
from testkit.servers import running_sidecar
from testkit.tiny_vision import BIDIRECTIONAL

# Chunks are shorter than a prompt; turns stand as the client sends them.
SETTINGS = {
    "CACHE_SPLICE": "false", "PREFILL_STEP_SIZE": "64", "CACHE_SELFTEST": "on_load",
}  # fmt: skip


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    settings = {"MODEL_PATH": str(folder / BIDIRECTIONAL), **SETTINGS}
    with running_sidecar(settings) as app:
        yield app


def retreats(app: App) -> int:
    with app.pool.lease("default") as model:
        return int(model.counters()["vlm_retreat"])


def asking(text: str, *seeds: int) -> Json:
    return user(f"{text} {WORDS}", *map(image_part, seeds), "what?")


def test_it_sees_and_its_test_has_passed(app: App) -> None:
    """By the library's own computation of one whole prompt."""
    with app.pool.lease("default") as model:
        vision_encoder = model.engine.model.vision_encoder
        assert vision_encoder is not None
        assert not vision_encoder.is_causal
        assert model.engine.selftest["images"] == "ok"
        assert model.failed_tests == ()


def test_behind_its_last_image_a_talk_is_warm_and_before_it_cold(app: App) -> None:
    """And each answer is that of a process that never saw the talk."""
    forget(app)
    talk = [asking("first", 1)]
    answers = [ask(app, talk)]
    for number in range(2):
        talk += [said(answers[-1]), asking(f"more {number}")]
        answers.append(ask(app, talk))
        before = answers[-2]["usage"]["prompt_tokens"]
        assert cached(answers[-1]) >= before - 1
    assert retreats(app) == 0
    talk += [said(answers[-1]), asking("another two", 2, 3)]
    answers.append(ask(app, talk))
    assert cached(answers[-1]) == 0
    assert retreats(app) == 1
    talk += [said(answers[-1]), asking("and so")]
    answers.append(ask(app, talk))
    assert cached(answers[-1]) >= answers[-2]["usage"]["prompt_tokens"] - 1
    for number, warm in enumerate(answers):
        forget(app)
        assert_same(warm, ask(app, talk[: 2 * number + 1]))


def test_an_image_is_read_from_both_ends(
    folder: Path, tmp_path: Path, app: App
) -> None:
    """With the attention of a text model its answers are others: the mask is used."""
    causal = shutil.copytree(folder / BIDIRECTIONAL, tmp_path / "causal")
    config: dict[str, Any] = json.loads((causal / "config.json").read_text())
    config["text_config"].pop("use_bidirectional_attention")
    (causal / "config.json").write_text(json.dumps(config))
    settings = {"MODEL_PATH": str(causal), **SETTINGS, "CACHE_SELFTEST": "off"}
    with running_sidecar(settings) as other:
        found = values(ask(other, [asking("one", 5)]))
    here = values(ask(app, [asking("one", 5)]))
    assert [value for _, value in here] != pytest.approx(
        [value for _, value in found], abs=2e-4
    )


def test_texts_are_warm_in_chunks_as_ever(app: App) -> None:
    talk = [asking("no image")]
    first = ask(app, talk)
    talk += [said(first), asking("more")]
    assert cached(ask(app, talk)) >= first["usage"]["prompt_tokens"] - 1
