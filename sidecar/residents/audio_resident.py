"""Loaded models of sound: one that writes down what is said, one that speaks."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sidecar.engine.audio_model import AudioModel
from sidecar.engine.hearing import Heard, Hearing
from sidecar.engine.speaking import Speaking, Spoken

_MOST_CHARACTERS = 4096


@dataclass(frozen=True)
class AudioResident:
    """
    What the pool leases, and what hearing and speaking have in common.

    Args:
        leave: called once, when the weights are gone.
    """

    name: str
    model: AudioModel
    leave: Callable[[], None]

    takes_images: ClassVar[bool] = False
    failed_tests: ClassVar[tuple[str, ...]] = ()

    @property
    def max_context(self) -> int:
        """Most characters of text that go in."""
        return _MOST_CHARACTERS

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.model.num_bytes

    def counters(self) -> dict[str, int]:
        """It keeps nothing that could be reused."""
        return {}

    def close(self) -> int:
        """Give the weights back; the bytes. A second time does nothing."""
        if self.model.is_closed:
            return 0
        freed = self.model.close()
        self.leave()
        return freed


@dataclass(frozen=True)
class HearingResident(AudioResident):
    """
    Writes down what is said.

    Args:
        rate: samples a second that it hears.
    """

    rate: int

    def hear(
        self,
        samples: np.ndarray,
        language: str | None,
        prompt: str | None,
        temperature: float | None,
    ) -> Heard:
        """
        Write down one window of at most 30 seconds.

        Args:
            samples: (n,) float32 at `rate`.
        Raises:
            BadRequest: the model does not know the language.
        """
        return Hearing(self.model).hear(samples, language, prompt, temperature)


@dataclass(frozen=True)
class SpeakingResident(AudioResident):
    """Speaks texts."""

    def check(self, speed: float | None) -> None:
        """
        Refuse what it cannot do, before anything is computed.

        Raises:
            BadRequest: it speaks at one speed.
        """
        Speaking(self.model).check(speed)

    def speak(
        self, text: str, voice: str | None, speed: float | None
    ) -> Generator[Spoken, None, None]:
        """
        Segments of speech, each computed when it is asked for; close it.

        Raises:
            BadRequest: it cannot do this voice.
        """
        return Speaking(self.model).speak(text, voice, speed)
