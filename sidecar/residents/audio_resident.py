"""Loaded models of sound: one that writes down what is said, one that speaks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from sidecar.core.audio import MAX_CHARACTERS
from sidecar.engine.audio.audio_model import AudioModel
from sidecar.engine.audio.hearing import Hearing
from sidecar.engine.audio.speaking import Speaking


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
        return MAX_CHARACTERS

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

    hearing: Hearing
    rate: int


@dataclass(frozen=True)
class SpeakingResident(AudioResident):
    """Speaks texts."""

    speaking: Speaking
