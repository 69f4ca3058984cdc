"""
Samples as a file that is written while they come: WAV, MP3; FLAC at the end.

WAV and MP3 do not say how long they are: their readers go on to the end of the answer.
FLAC says it in its head, and readers believe it: so it is written when all is there.
"""

import io
import struct
from typing import Any

import numpy as np

from sidecar.core.audio import SoundFormat
from sidecar.core.errors import BadRequest

CONTENT_TYPES: dict[SoundFormat, str] = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
}
_MP3_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_UNKNOWN_SIZE = 0xFFFFFFFF  # as ffmpeg and OpenAI write it into a pipe
_HALFWAY = 0.6  # of libsndfile's scale: 64 kbit/s at 24 kHz; constant, so it can be cut


def default_format(rate: int) -> SoundFormat:
    """Where none is asked for: MP3, as at OpenAI, or WAV where there is no MP3."""
    return "mp3" if rate in _MP3_RATES and _is_known("mp3") else "wav"


class SoundWriter:
    """
    Writes one channel of 16 bits.

    Args:
        rate: samples a second.
        is_whole: whether all samples come in one `add`, so that a WAV can say its size.
    Raises:
        BadRequest: the format has no such rate, or cannot be written here.
    """

    def __init__(self, form: SoundFormat, rate: int, *, is_whole: bool = False) -> None:
        self._form, self._rate, self._is_whole = form, rate, is_whole
        self._sink = _Sink()
        self._file: Any = None
        self._has_begun = False
        if form == "wav":
            return
        _check(form, rate)
        import soundfile

        more = {"bitrate_mode": "CONSTANT", "compression_level": _HALFWAY}
        self._file = soundfile.SoundFile(
            self._sink,
            "w",
            samplerate=rate,
            channels=1,
            format=form.upper(),
            **(more if form == "mp3" else {"subtype": "PCM_16"}),
        )

    def add(self, samples: np.ndarray) -> bytes:
        """
        Bytes that are ready once these samples are there.

        Args:
            samples: (n,) float32, -1..1; what is beyond is cut off.
        """
        levels = np.clip(samples, -1, 1) * 32767
        packed: np.ndarray = levels.astype("<i2")
        if self._form == "wav":
            size = packed.nbytes if self._is_whole else None
            head = b"" if self._has_begun else _wav_head(self._rate, size)
            self._has_begun = True
            return head + bytes(packed.tobytes())
        self._file.write(packed)
        return self._sink.take() if self._form == "mp3" else b""

    def end(self) -> bytes:
        """The last bytes; nothing can be added any more."""
        if self._file is not None:
            self._file.close()
        return self._sink.take()


class _Sink:
    """What libsndfile writes into: it goes back, to write sizes into heads."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self._taken = 0
        self.tell, self.seek = self._bytes.tell, self._bytes.seek
        self.read, self.write = self._bytes.read, self._bytes.write

    def take(self) -> bytes:
        found = self._bytes.getvalue()[self._taken :]
        self._taken += len(found)
        return found


def _is_known(form: SoundFormat) -> bool:
    """Whether libsndfile here was built with a format."""
    import soundfile

    return form.upper() in soundfile.available_formats()


def _check(form: SoundFormat, rate: int) -> None:
    if not _is_known(form):
        raise BadRequest(
            f"response_format {form} cannot be written here: libsndfile lacks it",
            param="response_format",
        )
    if form == "mp3" and rate not in _MP3_RATES:
        raise BadRequest(
            f"response_format mp3 has no {rate} samples a second, as this model "
            "speaks; take wav or flac",
            param="response_format",
        )


def _wav_head(rate: int, num_bytes: int | None) -> bytes:
    size = _UNKNOWN_SIZE if num_bytes is None else num_bytes
    whole = _UNKNOWN_SIZE if num_bytes is None else num_bytes + 36
    sound = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    return (
        b"RIFF"
        + struct.pack("<I", whole)
        + b"WAVEfmt "
        + sound
        + b"data"
        + struct.pack("<I", size)
    )
