"""What is spoken comes as a file that readers take, whole or while it is written."""

import io

import numpy as np
import pytest
import soundfile

from sidecar.audio.sound_writer import SoundWriter, default_format
from sidecar.core.audio import SoundFormat
from sidecar.core.errors import BadRequest
from testkit.tiny_audio import tones

CUTS = [0, 1, 4000, 24_000, 24_001, 60_000, 72_000]


def written(form: SoundFormat, rate: int, *, is_whole: bool) -> tuple[list[bytes], int]:
    sound = tones(3, rate=24_000)
    writer = SoundWriter(form, rate, is_whole=is_whole)
    cuts = [0, len(sound)] if is_whole else CUTS
    parts = [writer.add(sound[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    return [*parts, writer.end()], len(sound)


@pytest.mark.parametrize("form", ["wav", "flac", "mp3"])
@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("is_whole", [True, False])
def test_it_reads_as_what_was_spoken(
    form: SoundFormat, rate: int, is_whole: bool
) -> None:
    parts, size = written(form, rate, is_whole=is_whole)
    samples, found = soundfile.read(io.BytesIO(b"".join(parts)), dtype="int16")
    assert found == rate
    if form == "mp3":
        assert size <= len(samples) < size + 4000
    else:
        levels = (np.clip(tones(3, rate=24_000), -1, 1) * 32767).astype(np.int16)
        assert np.array_equal(samples, levels)


def test_wav_and_mp3_come_while_they_are_written() -> None:
    for form in ("wav", "mp3"):
        parts, _ = written(form, 24_000, is_whole=False)
        assert all(parts[i] for i in (2, 4, 5))  # of more than a frame each
        assert len(parts[-1]) < len(b"".join(parts)) / 2


def test_what_is_too_loud_is_cut_and_does_not_turn_over() -> None:
    writer = SoundWriter("wav", 24_000, is_whole=True)
    data = writer.add(np.array([0.0, 3.0, -3.0], np.float32)) + writer.end()
    samples, _ = soundfile.read(io.BytesIO(data), dtype="int16")
    assert samples.tolist() == [0, 32767, -32767]


def test_a_rate_that_mp3_has_not_is_named() -> None:
    with pytest.raises(BadRequest, match="mp3 has no 23456") as refused:
        SoundWriter("mp3", 23_456)
    assert refused.value.param == "response_format"
    assert default_format(23_456) == "wav"
    assert default_format(24_000) == "mp3"


def test_without_mp3_in_libsndfile_the_default_is_wav(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soundfile, "available_formats", lambda: {"WAV": "", "FLAC": ""})
    assert default_format(24_000) == "wav"
    with pytest.raises(BadRequest, match="mp3 cannot be written here"):
        SoundWriter("mp3", 24_000)
