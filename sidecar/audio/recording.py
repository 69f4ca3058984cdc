"""
A sound file as windows of samples, for models that hear so much at once.

It is decoded window by window: what a small file comes to does not fill the memory. A
window ends where it is quietest in its last seconds, so that no word is cut in two.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from sidecar.core.errors import BadRequest

FORMATS = ("WAV", "FLAC", "MP3", "OGG", "AIFF")
WINDOW_S = 30.0
_READ_AS = (*FORMATS, "WAVEX", "RF64")
_MIN_S = 0.1
_SEARCHED_S = 5.0  # at a window's end, for its quietest place
_FRAME_S = 0.1
_MAX_DENOMINATOR = 1000
_MAX_RATE, _MIN_RATE, _MAX_CHANNELS = 384_000, 4_000, 16


@dataclass(frozen=True, slots=True)
class Window:
    """
    A part of a recording.

    Args:
        start_s: where it begins.
        seconds: how long it is.
        samples: (n,) float32, one channel, at the rate that was asked for.
    """

    start_s: float
    seconds: float
    samples: np.ndarray


class Recording:
    """
    A sound file in memory: WAV, FLAC, MP3, Ogg (Vorbis, Opus) or AIFF. One thread.

    Raises:
        BadRequest: it is empty, of another format, or shorter than 0.1 s.
    """

    def __init__(self, data: bytes) -> None:
        import soundfile

        if not data:
            raise BadRequest("file is empty", param="file")
        try:
            self._file: Any = soundfile.SoundFile(io.BytesIO(data))
        except (soundfile.SoundFileError, ValueError, TypeError) as error:
            raise _unreadable() from error
        self._fault = soundfile.SoundFileError
        self._rate = int(self._file.samplerate)
        self._check()

    def windows(self, rate: int) -> Iterator[Window]:
        """
        All of it, 25 to 30 seconds at once.

        Args:
            rate: samples a second that are wanted; it is resampled.
        Raises:
            BadRequest: it is damaged, or shorter than 0.1 s.
        """
        maximum, start = int(WINDOW_S * self._rate), 0
        held = self._read(maximum + 1)
        if len(held) < _MIN_S * self._rate:
            raise BadRequest(
                f"file must hold at least {_MIN_S} s of sound", param="file"
            )
        while len(held):
            size = len(held) if len(held) <= maximum else _quietest(held, self._rate)
            samples = _resampled(held[:size], self._rate, rate)
            yield Window(start / self._rate, size / self._rate, samples)
            start += size
            held = np.concatenate([held[size:], self._read(size)])

    def _check(self) -> None:
        if self._file.format not in _READ_AS:
            raise _unreadable()
        if not _MIN_RATE <= self._rate <= _MAX_RATE:
            raise BadRequest(
                f"file must have {_MIN_RATE}..{_MAX_RATE} samples a second, "
                f"got {self._rate}",
                param="file",
            )
        if self._file.channels > _MAX_CHANNELS:
            raise BadRequest(
                f"file must have 1..{_MAX_CHANNELS} channels, "
                f"got {self._file.channels}",
                param="file",
            )

    def _read(self, size: int) -> np.ndarray:
        """At most so many samples, as one channel."""
        found, left = [np.zeros(0, np.float32)], size
        while left:
            try:
                block = self._file.read(
                    min(left, self._rate), dtype="float32", always_2d=True
                )
            except self._fault as error:
                raise BadRequest("file is damaged", param="file") from error
            if not len(block):
                break
            left -= len(block)
            found.append(np.nan_to_num(block, posinf=1, neginf=-1).mean(axis=1))
        return np.concatenate(found)


def _quietest(samples: np.ndarray, rate: int) -> int:
    """Where to cut a window: amid the quietest tenth of a second of its last ones."""
    frame = int(_FRAME_S * rate)
    maximum = int(WINDOW_S * rate)
    searched = samples[maximum - int(_SEARCHED_S * rate) : maximum]
    frames = searched[: len(searched) // frame * frame].reshape(-1, frame)
    loudness = np.square(frames).sum(axis=1)
    last = len(loudness) - 1 - int(np.argmin(loudness[::-1]))  # of equal ones
    return maximum - len(searched) + last * frame + frame // 2


def _resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    minimum = int(_MIN_S * wanted)
    if rate != wanted:
        from scipy.signal import resample_poly

        # Of two odd rates the exact ratio takes a filter of millions of taps.
        ratio = Fraction(wanted, rate).limit_denominator(_MAX_DENOMINATOR)
        samples = resample_poly(samples, ratio.numerator, ratio.denominator)
    samples = np.asarray(samples, np.float32)
    return np.pad(samples, (0, max(0, minimum - len(samples))))


def _unreadable() -> BadRequest:
    return BadRequest(
        f"file must be a sound file that can be decoded: {', '.join(FORMATS)}",
        param="file",
    )
