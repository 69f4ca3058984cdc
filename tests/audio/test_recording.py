"""Sound files are read in windows that end where it is quiet, whatever their format."""

import contextlib

import numpy as np
import pytest

from sidecar.audio.recording import FORMATS, Recording, _resampled
from sidecar.core.errors import BadRequest
from testkit.tiny_audio import RATE, sound_file, tones


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_its_samples(form: str) -> None:
    sound = tones(2)
    (window,) = Recording(sound_file(sound, form)).windows(RATE)
    assert window.samples.dtype == np.float32
    assert len(window.samples) == pytest.approx(len(sound), abs=2500)  # coders' delay
    if form in ("WAV", "AIFF"):
        assert np.array_equal(window.samples, sound)
    if form == "FLAC":
        assert np.abs(window.samples - sound).max() < 1e-4


def test_windows_are_all_of_it_and_end_where_it_is_silent() -> None:
    sound = tones(95)  # silent in the last half of each tenth second
    windows = list(Recording(sound_file(sound)).windows(RATE))
    assert [round(w.start_s, 1) for w in windows] == pytest.approx(
        [0, 29.9, 59.9, 89.9], abs=0.3
    )
    assert np.array_equal(np.concatenate([w.samples for w in windows]), sound)
    assert sum(w.seconds for w in windows) == pytest.approx(95)
    assert all(len(w.samples) <= 30 * RATE for w in windows)
    for window in windows[:-1]:
        assert np.abs(window.samples[-100:]).max() == 0


def test_thirty_seconds_are_one_window() -> None:
    (window,) = Recording(sound_file(tones(30))).windows(RATE)
    assert window.seconds == 30


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_it_is_resampled_and_its_channels_are_mixed(rate: int) -> None:
    times = np.arange(3 * rate) / rate
    sound = np.sin(2 * np.pi * 440 * times)
    file = sound_file(np.stack([sound, np.zeros_like(sound)], axis=1), rate=rate)
    (window,) = Recording(file).windows(RATE)
    assert len(window.samples) == 3 * RATE
    wanted = np.sin(2 * np.pi * 440 * np.arange(3 * RATE) / RATE) / 2
    middle = slice(RATE, 2 * RATE)
    assert np.abs(window.samples[middle] - wanted[middle]).max() < 0.01


@pytest.mark.parametrize(
    "data",
    [b"", b"no sound at all" * 9, b"RIFF\x00\x00\x00\x00WAVEfmt ", b"\x00" * 4096,
     b"fLaC" + bytes(300), b"ID3" + bytes(500), b"OggS" + bytes(200)],
    ids=["empty", "text", "head", "zeros", "flac", "mp3", "ogg"],
)  # fmt: skip
def test_what_is_no_sound_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="^file ") as refused:
        list(Recording(data).windows(RATE))
    assert refused.value.param == "file"


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (sound_file(tones(1)[:100]), "0.1 s"),
        (sound_file(tones(1)[:0]), "0.1 s"),
        (sound_file(np.zeros((9000, 17), np.float32)), "1..16 channels"),
        (sound_file(tones(1), rate=3000), "4000..384000"),
    ],
    ids=["short", "none", "channels", "rate"],
)
def test_what_is_out_of_range_is_named(file: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        list(Recording(file).windows(RATE))


def test_what_is_no_number_is_no_sound() -> None:
    sound = tones(1)
    sound[5000:6000] = np.nan
    sound[7000] = np.inf
    (window,) = Recording(sound_file(sound)).windows(RATE)
    assert np.isfinite(window.samples).all()


def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes_or_refused() -> None:
    for form in FORMATS:
        data = sound_file(tones(5), form)
        for size in range(0, len(data), len(data) // 7):
            with contextlib.suppress(BadRequest):
                windows = list(Recording(data[:size]).windows(RATE))
                assert sum(w.seconds for w in windows) <= 5.2


def test_an_odd_rate_costs_what_an_even_one_does() -> None:
    """383,999 a second has no factor in common with 16,000."""
    one = _resampled(np.sin(np.arange(383_999) / 50, dtype=np.float32), 383_999, 16_000)
    other = _resampled(
        np.sin(np.arange(384_000) / 50, dtype=np.float32), 384_000, 16_000
    )
    assert abs(len(one) - len(other)) <= 1
    assert np.abs(one[100:15_900] - other[100:15_900]).max() < 0.05
