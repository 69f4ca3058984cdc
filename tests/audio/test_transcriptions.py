"""Transcriptions by real tiny models: what the library writes, by every form asked."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sidecar.app import App
from sidecar.audio.recording import Recording
from sidecar.service.audio import joined
from testkit.tiny_audio import RATE, sound_file, tones
from testkit.tiny_models import make_model
from tests.audio.asking import library_texts, refused, transcribe


@pytest.mark.parametrize("model", ["moonshine", "whisper"])
def test_the_text_is_the_librarys_own(app: App, folder: Path, model: str) -> None:
    sounds = [tones(3, seed=1), tones(4, seed=3)]
    wanted = library_texts(app, folder / model, sounds, temperature=0.0)
    for sound, text in zip(sounds, wanted, strict=True):
        answer = transcribe(app, sound_file(sound), model=model, temperature="0")
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"text": text.strip()}
        assert text.strip()
    if model == "moonshine":
        assert wanted[0] != wanted[1]


def test_a_long_recording_is_the_texts_of_its_windows(app: App, folder: Path) -> None:
    file = sound_file(tones(70))
    windows = [w.samples for w in Recording(file).windows(RATE)]
    assert len(windows) == 3
    wanted = library_texts(app, folder / "moonshine", windows)
    answer = transcribe(app, file, response_format="verbose_json").json()
    assert answer["text"] == joined(wanted)
    assert answer["duration"] == pytest.approx(70)
    assert [s["text"] for s in answer["segments"]] == wanted
    borders = [(s["start"], s["end"]) for s in answer["segments"]]
    assert [end for _, end in borders[:-1]] == [start for start, _ in borders[1:]]
    assert borders[0][0] == 0


def test_segments_of_a_window_have_their_place_in_the_recording(app: App) -> None:
    answer = transcribe(
        app, sound_file(tones(2)), model="whisper", temperature="0",
        response_format="verbose_json",
    ).json()  # fmt: skip
    assert answer["language"] == "en"
    assert answer["task"] == "transcribe"
    (segment,) = answer["segments"]
    assert 0 <= segment["start"] < segment["end"] <= 2
    assert answer["text"] == segment["text"].strip()


@pytest.mark.parametrize("form", ["WAV", "FLAC", "MP3", "OGG", "AIFF"])
def test_every_format_is_read(app: App, form: str) -> None:
    answer = transcribe(app, sound_file(tones(2), form), response_format="text")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.endswith("\n")
    assert answer.text.strip()


def test_the_path_without_v1(app: App) -> None:
    answer = httpx.post(
        f"{app.url}/audio/transcriptions", data={"model": "moonshine"},
        files={"file": ("x.wav", sound_file(tones(1)))}, timeout=120,
    )  # fmt: skip
    assert answer.status_code == 200


def test_what_a_model_has_no_use_for_is_passed_over(app: App) -> None:
    plain = transcribe(app, sound_file(tones(2))).json()
    told = transcribe(
        app, sound_file(tones(2)), prompt="names", language="de", user="me",
        **{"timestamp_granularities[]": "word"},
    )  # fmt: skip
    assert told.json() == plain


def test_a_prompt_and_a_language_reach_a_model_that_is_told(app: App) -> None:
    file = sound_file(tones(2))
    answer = transcribe(
        app, file, model="whisper", prompt="some names", language="English",
        temperature="0",
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    answer = transcribe(app, file, model="whisper", language="xx")
    status, param, message = refused(answer)
    assert (status, param) == (400, "language")
    assert "'xx'" in message


SOUND = sound_file(tones(1))


@pytest.mark.parametrize(
    ("file", "fields", "param"),
    [
        (b"", {}, "file"),
        (b"not a sound", {}, "file"),
        (SOUND[:60], {}, "file"),
        (SOUND, {"response_format": "srt"}, "response_format"),
        (SOUND, {"temperature": "1.5"}, "temperature"),
        (SOUND, {"temperature": "nan"}, "temperature"),
        (SOUND, {"temperature": "warm"}, "temperature"),
        (SOUND, {"language": "../en"}, "language"),
        (SOUND, {"prompt": "x" * 5000}, "prompt"),
        (SOUND, {"stream": "true"}, "stream"),
        (SOUND, {"user": "x" * 70_000}, "user"),
        (SOUND, {"model": "talker"}, "model"),
        (SOUND, {"model": "soprano"}, "model"),
        (SOUND, {"model": "nobody"}, "model"),
    ],
)
def test_bad_requests_name_the_field(
    app: App, file: bytes, fields: dict[str, str], param: str
) -> None:
    status, found, message = refused(transcribe(app, file, **fields))
    assert status in (400, 404, 422)
    assert found == param
    assert message


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"--x\r\n"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"--y\r\nhello"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nno name\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x",
         b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRI'),
        ("multipart/form-data; boundary=x",
         b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nRI\r\n--x--\r\n'),
        ("multipart/form-data; boundary=x",
         b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * 65
         + b"--x--\r\n"),
        ("multipart/form-data; boundary=" + "x" * 3000, b"--x\r\n"),
    ],
    ids=["json", "no-boundary", "empty", "other", "nameless", "cut", "no-file",
         "many", "long"],
)  # fmt: skip
def test_what_is_no_form_is_refused(app: App, kind: str, body: bytes) -> None:
    answer = httpx.post(
        f"{app.url}/v1/audio/transcriptions", content=body,
        headers={"content-type": kind}, timeout=60,
    )  # fmt: skip
    assert answer.status_code == 400, answer.text


def test_sound_is_not_counted_as_json(app: App) -> None:
    """Its bytes are any bytes: a million commas in it are no million values."""
    sound = np.full(1_500_000, 0.25, np.float32)
    commas = sound_file(sound).replace(sound[:1].tobytes(), b",,,;")
    answer = transcribe(app, commas, model="talker")
    assert refused(answer)[1] == "model"


def test_a_body_beyond_the_limit_is_refused(folder: Path, tmp_path: Path) -> None:
    from testkit.servers import running_sidecar

    talker = make_model(tmp_path / "talker", "dense")
    named = {"MODEL_PATH": str(talker), "MAX_BODY_MB": "1"}
    with running_sidecar(named) as app:
        answer = transcribe(app, bytes(2 << 20))
        assert answer.status_code == 413


def test_a_chat_with_it_is_refused(app: App) -> None:
    body: dict[str, Any] = {
        "model": "moonshine", "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
    assert refused(answer)[:2] == (400, "model")


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        ([], ""),
        (["", " ", ""], ""),
        ([" Hello", " there. "], "Hello there."),
        (["one", "", "two"], "one two"),
        (["今日は", "いい天気"], "今日はいい天気"),
    ],
)
def test_texts_are_joined_as_their_script_is(texts: list[str], whole: str) -> None:
    assert joined(texts) == whole
