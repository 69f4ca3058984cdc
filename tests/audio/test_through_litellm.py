"""Through the real LiteLLM with the real openai client, with a key and without."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from sidecar.app import App
from testkit.proxy import Proxy, running_proxy
from testkit.servers import running_sidecar
from testkit.tiny_audio import sound_file, tones
from tests.audio.asking import levels, library_speech, library_texts, seed

KEY = "sk-of-the-sidecar"


@pytest.fixture(scope="module", params=[None, KEY], ids=["open", "keyed"])
def both(
    request: pytest.FixtureRequest,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[App, Proxy]]:
    key: str | None = request.param
    named = {"MODEL_DIR": str(folder), "MODEL_PATH": str(folder / "talker")}
    named |= {"MLX_API_KEY": key} if key else {}
    place = tmp_path_factory.mktemp("proxy")
    with (
        running_sidecar(named) as app,
        running_proxy(app.url, place, sidecar_key=key) as proxy,
    ):
        yield app, proxy


def sound(seconds: float = 3) -> io.BytesIO:
    file = io.BytesIO(sound_file(tones(seconds)))
    file.name = "sound.wav"
    return file


def test_a_transcription_is_the_librarys(both: tuple[App, Proxy], folder: Path) -> None:
    app, proxy = both
    (wanted,) = library_texts(app, folder / "moonshine", [tones(3)])
    create = proxy.openai.audio.transcriptions.create
    found = create(model="moonshine", file=sound())
    assert found.text == wanted
    text = create(model="moonshine", file=sound(), response_format="text")
    # LiteLLM answers in JSON, whatever is asked for.
    assert json.loads(str(text))["text"].strip() == wanted
    told = create(
        model="whisper", file=sound(2), response_format="verbose_json", temperature=0,
        language="en", prompt="some names",
    )  # fmt: skip
    assert told.language == "en"
    assert told.duration == pytest.approx(2)
    assert told.segments
    assert told.segments[0].text == told.text


def test_a_long_recording_goes_through(both: tuple[App, Proxy]) -> None:
    _, proxy = both
    found = proxy.openai.audio.transcriptions.create(
        model="moonshine", file=sound(40), response_format="verbose_json"
    )
    assert found.duration == pytest.approx(40)
    assert len(found.segments or ()) == 2


@pytest.mark.parametrize("form", ["wav", "flac", "mp3"])
def test_speech_comes_in_every_format(
    both: tuple[App, Proxy], folder: Path, form: str
) -> None:
    app, proxy = both
    create = proxy.openai.audio.speech.create
    create(model="soprano", voice="alloy", input="Hi.")  # loaded
    text = "Hello there.\nAnd so on."
    wanted = np.concatenate(library_speech(app, folder / "soprano", text, 5))
    seed(app, 5)
    found = create(model="soprano", voice="alloy", input=text, response_format=form)  # type: ignore[arg-type]
    samples, rate = levels(found.content)
    assert rate == 32_000
    if form != "mp3":
        assert np.array_equal(samples, wanted)


def test_speech_is_streamed(both: tuple[App, Proxy]) -> None:
    _, proxy = both
    with proxy.openai.audio.speech.with_streaming_response.create(
        model="soprano", voice="alloy", input="One.\nTwo.\nThree.",
        response_format="wav",
    ) as answer:  # fmt: skip
        data = b"".join(answer.iter_bytes())
    assert levels(data)[1] == 32_000


def test_what_is_refused_is_told(both: tuple[App, Proxy]) -> None:
    _, proxy = both
    audio = proxy.openai.audio
    with pytest.raises(openai.BadRequestError, match="sound file"):
        audio.transcriptions.create(model="moonshine", file=("a.wav", b"no sound"))
    with pytest.raises(openai.BadRequestError, match="speed must be 1"):
        audio.speech.create(model="soprano", voice="alloy", input="Hi.", speed=2)
    with pytest.raises(openai.BadRequestError, match="4096"):
        audio.speech.create(model="soprano", voice="alloy", input="x" * 4097)
