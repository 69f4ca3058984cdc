"""A model whose images read themselves: all of a prompt with them is one pass (V6)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.pictures import image_part
from testkit.servers import running_sidecar
from tools.tiny_checkpoints import make_seeing

# Of the tiny processor's ears, which transformers falls back to torch for.
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")

Json = dict[str, Any]
WORDS = "tell me what can be seen in here, piece by piece, and why it is so. " * 6
# Chunks are shorter than a prompt; turns stand as the client sends them.
SETTINGS = {
    "CACHE_SPLICE": "false", "PREFILL_STEP_SIZE": "64", "CACHE_SELFTEST": "on_load",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gemma4") / "gemma4"
    make_seeing(root, "gemma4")
    config = json.loads((root / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = "vision"
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(folder), **SETTINGS}) as app:
        yield app


def ask(app: App, talk: list[Json]) -> Json:
    body = {"messages": talk, "max_tokens": 6, "temperature": 0, "logprobs": True}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def user(text: str, *seeds: int) -> Json:
    parts = [{"type": "text", "text": f"{text} {WORDS}"}, *map(image_part, seeds)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}


def said(answer: Json) -> Json:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def cached(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def values(answer: Json) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def retreats(app: App) -> int:
    with app.pool.lease("default") as model:
        return int(model.counters()["vlm_retreat"])


def test_it_sees_and_its_test_has_passed(app: App) -> None:
    """By the library's own computation of one whole prompt."""
    with app.pool.lease("default") as model:
        eyes = model.engine.model.eyes
        assert eyes is not None
        assert not eyes.is_causal
        assert model.engine.selftest["images"] == "ok"
        assert model.failed_tests == ()


def test_behind_its_last_image_a_talk_is_warm_and_before_it_cold(app: App) -> None:
    """And each answer is that of a process that never saw the talk."""
    httpx.post(f"{app.url}/admin/cache/clear", timeout=60)
    talk = [user("first", 1)]
    answers = [ask(app, talk)]
    for number in range(2):
        talk += [said(answers[-1]), user(f"more {number}")]
        answers.append(ask(app, talk))
        before = answers[-2]["usage"]["prompt_tokens"]
        assert cached(answers[-1]) >= before - 1
    assert retreats(app) == 0
    talk += [said(answers[-1]), user("another", 2)]
    answers.append(ask(app, talk))
    assert cached(answers[-1]) == 0
    assert retreats(app) == 1
    talk += [said(answers[-1]), user("and so")]
    answers.append(ask(app, talk))
    assert cached(answers[-1]) >= answers[-2]["usage"]["prompt_tokens"] - 1
    httpx.post(f"{app.url}/admin/cache/clear", timeout=60)
    for number, warm in enumerate(answers):
        cold = ask(app, talk[: 2 * number + 1])
        assert cold["choices"][0]["message"] == warm["choices"][0]["message"]
        assert values(cold) == pytest.approx(values(warm), abs=2e-4)
        httpx.post(f"{app.url}/admin/cache/clear", timeout=60)


def test_an_image_is_read_from_both_ends(folder: Path, app: App) -> None:
    """With the attention of a text model its answers are others: the mask is used."""
    causal = folder.parent / "causal"
    causal.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (causal / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].pop("use_bidirectional_attention")
    (causal / "config.json").write_text(json.dumps(config))
    with running_sidecar({"MODEL_PATH": str(causal), **SETTINGS}) as other:
        found = values(ask(other, [user("one", 5)]))
    assert values(ask(app, [user("one", 5)])) != pytest.approx(found, abs=2e-4)


def test_texts_are_warm_in_chunks_as_ever(app: App) -> None:
    talk = [user("no image")]
    first = ask(app, talk)
    talk += [said(first), user("more")]
    assert cached(ask(app, talk)) >= first["usage"]["prompt_tokens"] - 1
