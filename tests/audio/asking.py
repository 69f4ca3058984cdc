"""Requests for speech and transcriptions, and the library's own answers to them."""

import io
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import soundfile
from mlx_audio.stt.utils import load_model as load_stt
from mlx_audio.tts.utils import load_model as load_tts

from sidecar.app import App

LIMIT_S = 180.0


def transcribe(app: App, file: bytes, **fields: str) -> httpx.Response:
    """Ask for a transcription, of `moonshine` unless another is named."""
    return httpx.post(
        f"{app.url}/v1/audio/transcriptions",
        data={"model": "moonshine", **fields},
        files={"file": ("sound", file)},
        timeout=LIMIT_S,
    )


def speak(app: App, **body: Any) -> httpx.Response:
    """Ask `soprano` for speech."""
    return httpx.post(
        f"{app.url}/v1/audio/speech", json={"model": "soprano", **body}, timeout=LIMIT_S
    )


def refused(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Status, field and message of an error."""
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def levels(data: bytes) -> tuple[np.ndarray, int]:
    """Samples of a sound file, (n,) int16, and their rate."""
    return soundfile.read(io.BytesIO(data), dtype="int16")  # type: ignore[no-any-return]


def library_texts(
    app: App, folder: Path, sounds: list[np.ndarray], **how: Any
) -> list[str]:
    """What the library itself writes down of some sounds."""

    def hear() -> list[str]:
        model: Any = load_stt(folder, model_name_parts=[])
        return [model.generate(mx.array(sound), **how).text for sound in sounds]

    return app.gpu.call(hear)


def library_speech(app: App, folder: Path, text: str, seed: int) -> list[np.ndarray]:
    """What the library itself speaks, segment by segment, as (n,) int16."""

    def speech() -> list[np.ndarray]:
        model: Any = load_tts(folder, model_name_parts=[])
        mx.eval(model.parameters())
        mx.random.seed(seed)
        found = [np.array(segment.audio) for segment in model.generate(text=text)]
        return [(np.clip(sound, -1, 1) * 32767).astype(np.int16) for sound in found]

    return app.gpu.call(speech)


def seed(app: App, number: int) -> None:
    """Set the generator that sampled speech is drawn with."""
    app.gpu.call(lambda: mx.random.seed(number))
