"""Speech by a real tiny model: the library's own samples, in every format."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sidecar.app import App
from tests.audio.asking import (
    LIMIT_S,
    levels,
    library_speech,
    refused,
    seed,
    speak,
)

TEXT = "Hello there."


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_the_samples_are_the_librarys_own(app: App, folder: Path, form: str) -> None:
    wanted = np.concatenate(library_speech(app, folder / "soprano", TEXT, 3))
    assert speak(app, input="Hi.", response_format="wav").status_code == 200  # loaded
    seed(app, 3)
    answer = speak(app, input=TEXT, voice="alloy", response_format=form)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == f"audio/{form}"
    samples, rate = levels(answer.content)
    assert rate == 32_000
    assert np.array_equal(samples, wanted)


def test_a_long_text_is_streamed_and_is_the_same(app: App, folder: Path) -> None:
    text = "Hello there.\nAnd so on.\nBye."
    wanted = np.concatenate(library_speech(app, folder / "soprano", text, 4))
    seed(app, 4)
    answer = speak(app, input=text, response_format="wav")
    assert answer.headers["transfer-encoding"] == "chunked"
    assert np.array_equal(levels(answer.content)[0], wanted)


def test_the_default_is_mp3(app: App) -> None:
    answer = speak(app, input="Hi.")
    assert answer.headers["content-type"] == "audio/mpeg"
    assert len(levels(answer.content)[0]) > 0


def test_the_only_one_of_its_kind_is_meant_without_a_name(app: App) -> None:
    answer = httpx.post(
        f"{app.url}/audio/speech", json={"input": "Hi."}, timeout=LIMIT_S
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": " \n "}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"input": 3}, "input"),
        ({"voice": "../../etc/passwd"}, "voice"),
        ({"voice": "a.safetensors"}, "voice"),
        ({"voice": 3}, "voice"),
        ({"response_format": "opus"}, "response_format"),
        ({"stream_format": "sse"}, "stream_format"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 4.1}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"speed": 2}, "speed"),
        ({"model": "talker"}, "model"),
        ({"model": "moonshine"}, "model"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_bad_requests_name_the_field(
    app: App, body: dict[str, Any], param: str
) -> None:
    asked = {"input": TEXT, **body} if body else {}
    status, found, message = refused(speak(app, **asked))
    assert status in (400, 404, 422)
    assert found == param
    assert message


@pytest.mark.parametrize("form", ["wav", "flac", "mp3"])
def test_speech_without_a_sample_is_an_error(
    app: App, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole file of no sound would say that all is well."""
    assert speak(app, input="Hi.", response_format="wav").status_code == 200  # loaded
    with app.pool.lease("soprano") as resident:
        model = resident.speaking.model._model
    silent = [type("Result", (), {"audio": np.zeros(0), "sample_rate": 32_000})]
    monkeypatch.setattr(model, "generate", lambda **_: iter(silent), raising=False)
    for text in ("Hi.", "Hi.\nAnd so on."):
        answer = speak(app, input=text, response_format=form)
        assert answer.status_code == 500
        assert "no sound" in answer.json()["detail"]


def test_models_and_health_list_them_with_their_kind(app: App, folder: Path) -> None:
    listed = httpx.get(f"{app.url}/v1/models", timeout=60).json()["data"]
    health = httpx.get(f"{app.url}/health", timeout=60).json()["models"]
    for found in (listed, health):
        kinds = {model["id"]: model["kind"] for model in found}
        assert kinds["moonshine"] == kinds["whisper"] == "stt"
        assert kinds["soprano"] == "tts"
    admin = httpx.get(f"{app.url}/admin/models", timeout=60).json()["models"]
    sizes = {model["id"]: model["size_bytes"] for model in admin}
    file = folder / "soprano" / "model.safetensors"
    assert sizes["soprano"] == file.stat().st_size
