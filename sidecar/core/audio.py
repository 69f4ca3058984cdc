"""What is asked of models that hear and speak, and what was heard."""

from dataclasses import dataclass, field
from typing import Literal

SoundFormat = Literal["wav", "flac", "mp3"]
MAX_CHARACTERS = 4096  # of a text that is spoken
TextFormat = Literal["json", "text", "verbose_json"]


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """
    A text that is to be spoken.

    Args:
        voice: one of the model's; None: its own choice.
        form: None: MP3, or WAV where that cannot be written.
        speed: 1 is the model's own; None: not said.
    """

    model: str
    text: str
    voice: str | None = None
    form: SoundFormat | None = None
    speed: float | None = None


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """
    A recording that is to be written down.

    Args:
        file: a sound file as the client sent it.
        language: what is spoken; None: the model finds out, or knows one only.
        prompt: words that come up, for models that take one.
        temperature: None: the model's own rule.
    """

    model: str
    file: bytes = field(repr=False)
    form: TextFormat = "json"
    language: str | None = None
    prompt: str | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class TranscriptPart:
    """A part of what was said, with its place in the recording in seconds."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """
    What was said in a recording.

    Args:
        language: as the model calls it, "" if nobody said.
        duration_s: of the recording.
    """

    text: str
    parts: tuple[TranscriptPart, ...]
    language: str
    duration_s: float
