"""Other weights have another name, however they came into their files."""

import os
from pathlib import Path

import pytest

from sidecar.engine.loading.checkpoint_files import stamp
from sidecar.engine.loading.model_identity import WeightDigests, _identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(1 << 20))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(100))
    return tmp_path


def change_in_place(file: Path, place: int) -> None:
    """One byte, and size and time as before."""
    before = file.stat()
    with file.open("r+b") as data:
        data.seek(place)
        data.write(b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("place", [0, 333_333, (1 << 20) - 1])
def test_weights_changed_in_place_are_others(folder: Path, place: int) -> None:
    """Size and time are kept, as `rsync --inplace -t` does; wherever the byte is."""
    digests = WeightDigests(folder / "digests.json")
    before, stamped = digests.of(folder), stamp(folder)
    assert digests.of(folder) == before
    change_in_place(folder / "model-1.safetensors", place)
    assert digests.of(folder)[0] != before[0]
    assert digests.of(folder)[1] == before[1]
    assert stamp(folder) != stamped


@pytest.mark.parametrize("place", [0, (1 << 20) - 1])
def test_samples_tell_where_a_file_system_keeps_no_time_of_change(
    folder: Path, place: int
) -> None:
    """Both ends of each file, and places between."""
    file = folder / "model-1.safetensors"
    before = _identity(file).rpartition(":")[2]
    change_in_place(file, place)
    assert _identity(file).rpartition(":")[2] != before
