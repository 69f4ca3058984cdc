"""Text to speech, a segment at once: each is one turn of the GPU thread."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from sidecar.core.errors import BadRequest, GenerationFailed
from sidecar.engine.audio.audio_model import AudioModel
from sidecar.engine.loading.closed_network import NotFetched

_RATE = 24_000  # where a model does not say
_NOT_HERE = (ImportError, NotFetched)  # what a voice needs and nobody installed
_NO_SUCH_VOICE = (ValueError, KeyError, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class Spoken:
    """
    A segment of speech.

    Args:
        samples: (n,) float32, one channel. rate: of them a second.
    """

    samples: np.ndarray
    rate: int


class Speaking:
    """Speaks texts. Any thread."""

    def __init__(self, model: AudioModel) -> None:
        self.model = model

    def check(self, speed: float | None) -> None:
        """
        Raises:
            BadRequest: the model speaks at one speed.
        """
        if speed not in (None, 1) and "speed" not in self.model.parameters:
            raise BadRequest(
                f"speed must be 1 for this model, got {speed:g}", param="speed"
            )

    def speak(
        self, text: str, voice: str | None, speed: float | None
    ) -> Generator[Spoken, None, None]:
        """
        Segments as the library's generator gives them; each is computed when asked for.

        Close it where not all is wanted.

        Raises:
            BadRequest: the model cannot do this voice or text.
        """
        named: dict[str, Any] = {"voice": voice, "speed": speed}
        taken = self.model.parameters
        kwargs = {k: v for k, v in named.items() if v is not None and k in taken}
        segments: list[Any] = []  # of the library; its frame is the GPU thread's

        def pull(model: Any) -> Spoken | None:
            if not segments:
                segments.append(iter(model.generate(text=text, **kwargs)))
            found = next(segments[0], None)
            return None if found is None else _spoken(found, model)

        def drop(model: Any) -> None:
            closing = getattr(segments.pop(), "close", None)
            if closing is not None:
                closing()

        try:
            while (spoken := self._pulled(pull, voice)) is not None:
                yield spoken
        finally:
            if segments:
                self.model.turn(drop)

    def _pulled(
        self, pull: Callable[[Any], Spoken | None], voice: str | None
    ) -> Spoken | None:
        try:
            return self.model.turn(pull)
        except (*_NOT_HERE, *_NO_SUCH_VOICE) as error:
            message = f"the model cannot speak here: {_reason(error)}"
            if voice is None and not isinstance(error, _NOT_HERE):
                raise GenerationFailed(message) from error
            named = "" if voice is None else f" {voice}"
            raise BadRequest(f"voice{named}: {message}", param="voice") from error


def _spoken(found: Any, model: Any) -> Spoken:
    """
    Raises:
        GenerationFailed: it is no sound.
    """
    sound = found.audio
    if isinstance(sound, mx.array):
        sound = np.array(sound.astype(mx.float32))
    samples = np.squeeze(np.asarray(sound, np.float32))
    if samples.ndim > 1:  # several channels; there are fewer of them than samples
        samples = samples.mean(axis=int(np.argmin(samples.shape)))
    samples = samples.reshape(-1)
    if not np.isfinite(samples).all():
        raise GenerationFailed("the model gives no sound for this text")
    rates = (getattr(owner, "sample_rate", None) for owner in (found, model))
    rate = next((int(r) for r in rates if isinstance(r, (int, float)) and r > 0), _RATE)
    return Spoken(samples, rate)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
