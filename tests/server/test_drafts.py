"""What was drafted of an answer: from its client's prediction, and counted."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.service.turn import IGNORED as HEADER
from testkit.jobs import leased_engine
from testkit.servers import running_sidecar

Json = dict[str, Any]


@pytest.fixture(scope="module")
def app(model_folder: Callable[[str], Path]) -> Iterator[App]:
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        # Whatever a run is measured to cost here, it is tried.
        engine._loop._decode_batches.prices.of = lambda length: 1.0  # type: ignore[method-assign]
        yield app


def ask(app: App, **fields: Any) -> httpx.Response:
    talk = [{"role": "user", "content": "Say it again."}]
    body: Json = {"messages": talk, "max_tokens": 60, "temperature": 0, **fields}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)


def text_of(answer: httpx.Response) -> str:
    message = answer.json()["choices"][0]["message"]
    return (message.get("reasoning_content") or "") + (message["content"] or "")


def drafted(answer: httpx.Response) -> int:
    details = answer.json()["usage"]["completion_tokens_details"]
    return int(details.get("accepted_prediction_tokens", 0))


def metric(app: App, name: str) -> float:
    lines = httpx.get(f"{app.url}/metrics", timeout=30).text.splitlines()
    start = f'mlx_speculation_{name}_total{{drafter="lookup"}}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(start))


@pytest.mark.parametrize("form", ["text", "parts"])
def test_a_prediction_that_is_right_is_taken(app: App, form: str) -> None:
    expected = text_of(ask(app))
    content: Any = expected
    if form == "parts":
        half = len(expected) // 2
        content = [
            {"type": "text", "text": part}
            for part in (expected[:half], expected[half:])
        ]
    before = metric(app, "accepted")
    answer = ask(app, prediction={"type": "content", "content": content})
    assert text_of(answer) == expected
    assert HEADER not in answer.headers
    assert drafted(answer) > 0
    assert metric(app, "accepted") == before + drafted(answer)
    assert metric(app, "calls") <= metric(app, "drafted")


def test_a_prediction_that_is_wrong_changes_nothing(app: App) -> None:
    expected = text_of(ask(app))
    answer = ask(app, prediction={"type": "content", "content": "no " * 500})
    assert text_of(answer) == expected


def test_a_stream_counts_what_was_drafted(app: App) -> None:
    expected = text_of(ask(app))
    answer = ask(
        app,
        stream=True,
        stream_options={"include_usage": True},
        prediction={"type": "content", "content": expected},
    )
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    usage = next(u for line in lines if (u := json.loads(line[6:]).get("usage")))
    assert usage["completion_tokens"] == 60
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction"),
        ({}, "prediction.type"),
        ({"type": "file", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]"),
        (
            {"type": "content", "content": [{"type": "image_url"}]},
            "prediction.content[0].type",
        ),
        (
            {"type": "content", "content": [{"type": "text", "text": 5}]},
            "prediction.content[0].text",
        ),
        (
            {"type": "content", "content": [{"type": "text"}]},
            "prediction.content[0].text",
        ),
    ],
    ids=str,
)
def test_a_prediction_of_another_form_is_refused(
    app: App, prediction: Any, field: str
) -> None:
    answer = ask(app, prediction=prediction)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_prediction_without_effect_is_named(app: App) -> None:
    said = {"type": "content", "content": "a"}
    assert ask(app, prediction=said, n=2).headers[HEADER] == "prediction"
    assert HEADER not in ask(app, prediction={"type": "content", "content": ""}).headers


def test_tokens_that_the_model_has_no_rows_for_are_not_drafted(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A tokenizer may know more; penalties would write beside the logits."""
    folder = tmp_path / "beyond"
    shutil.copytree(model_folder("dense"), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    own = {**tokenizer["added_tokens"][-1], "special": True}
    for number in range(size, size + 200):
        added = {**own, "id": number, "content": f"<|far{number}|>"}
        tokenizer["added_tokens"].append(added)
    file.write_text(json.dumps(tokenizer))
    with running_sidecar({"MODEL_PATH": str(folder)}) as app:
        with leased_engine(app) as engine:
            prices = engine._loop._decode_batches.prices
            prices.of = lambda length: 1.0  # type: ignore[method-assign]
        fields: Json = {"frequency_penalty": 0.5, "seed": 1, "max_tokens": 24}
        for _ in range(5):
            expected = text_of(ask(app, **fields))
            said = expected[: len(expected) // 3] + f"<|far{size + 190}|>" * 12
            prediction = {"type": "content", "content": said}
            answer = ask(app, prediction=prediction, **fields)
            assert text_of(answer) == expected


def test_it_can_be_switched_off(model_folder: Callable[[str], Path]) -> None:
    settings = {"MODEL_PATH": str(model_folder("dense")), "SPECULATION": "off"}
    with running_sidecar(settings) as app:
        said = {"type": "content", "content": text_of(ask(app))}
        answer = ask(app, prediction=said)
        assert answer.headers[HEADER] == "prediction"
        assert drafted(answer) == 0
        assert "verify" not in httpx.get(f"{app.url}/v1/models", timeout=30).text
