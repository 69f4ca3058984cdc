"""
Whatever became of its files: a miss or the right answer, and never a failed request.

    pytest -m slow -n 0 tests/disk/test_damage.py

flips one bit of 5,000 bytes, and cuts files at 500 places.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.disk_thread import Urgency
from sidecar.kv.disk.forgetting import forget_all
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.kv.disk.tensor_file import Damaged
from testkit.jobs import random_ids
from testkit.kept_kv import (
    ask,
    disk_counts,
    flush,
    kept_sidecar,
    leased,
    said,
    slots,
)

ModelFolder = Callable[[str], Path]
Cold = Callable[[str, ModelIds], tuple[int, ...]]
KINDS = ["dense", "hybrid", "sliding"]


@dataclass
class Kept:
    """A running sidecar, its slots as they were written, and what is asked of it."""

    app: App
    root: Path
    whole: Path
    asked: ModelIds
    answer: tuple[int, ...]
    held: int

    def put_back(self) -> None:
        """All slots as they were, and nothing in memory: as after a restart."""
        with leased(self.app) as resident:
            resident.memory.forget()
            disk = resident.disk
            assert disk is not None

            def act() -> None:
                with disk._lock:
                    shutil.rmtree(self.root)
                    shutil.copytree(self.whole, self.root)
                    disk._index.clear()
                    disk._seen, disk._stamps = 0, {}

            # On the disk's thread nothing is written into what is being deleted.
            disk._machine.thread.submit(Urgency.RESTORE, act).result(60)

    def look(self) -> None:
        """Take in what is there."""
        with leased(self.app) as resident:
            disk = resident.disk
            assert disk is not None
            assert disk._place is not None
            disk._refresh(disk._place.folder)

    def check(self) -> int:
        """Ask; tokens that were not computed."""
        self.look()
        outcome = ask(self.app, self.asked)
        assert said(outcome) == self.answer
        return outcome.cached

    def files(self) -> list[Path]:
        """Of all slots."""
        return sorted(self.root.glob("*/slot_*"))


@pytest.fixture(params=KINDS)
def kept(
    request: pytest.FixtureRequest,
    model_folder: ModelFolder,
    cold: Cold,
    tmp_path: Path,
) -> Iterator[Kept]:
    """Two slots in a chain."""
    kind, root = str(request.param), tmp_path / "kv"
    ids = random_ids(1, 100)
    with kept_sidecar(root, model_folder(kind)) as app:
        whole = ModelIds(ids + said(ask(app, ids)))
        flush(app)
        whole = ModelIds(whole + random_ids(2, 80))
        whole = ModelIds(whole + said(ask(app, whole)))
        flush(app)
        assert len(slots(root)) == 2
        asked = ModelIds(whole + random_ids(3, 20))
        shutil.copytree(root, tmp_path / "whole")
        answer = cold(kind, asked)
        yield Kept(app, root, tmp_path / "whole", asked, answer, len(whole))


def test_what_is_whole_serves(kept: Kept) -> None:
    kept.put_back()
    assert kept.check() == kept.held


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_cut_file_of_ids_is_told_before_it_is_cleared_away(
    kept: Kept, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next start the janitor may be there first."""
    kept.put_back()
    for file in kept.root.glob("*/slot_2_tokens.*"):
        os.truncate(file, size)
    with caplog.at_level("WARNING"):
        root = kept.app.shared.disk
        assert root is not None
        root.root.clear_away()
    assert "KV slot 2 of" in caplog.text
    assert "is damaged and deleted" in caplog.text


def flip_some(kept: Kept, count: int, seed: str) -> int:
    """Flip a bit somewhere, again and again; how often that was a miss."""
    chance, misses = random.Random(seed), 0
    for _ in range(count):
        kept.put_back()
        file = chance.choice(kept.files())
        data = bytearray(file.read_bytes())
        place = chance.randrange(
            min(len(data), 4096 if chance.random() < 0.5 else 1 << 60)
        )
        data[place] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        misses += kept.check() < kept.held
    return misses


def cut_some(kept: Kept, count: int, seed: str) -> int:
    """Cut a file short somewhere; how often that was a miss."""
    chance, misses = random.Random(seed), 0
    for _ in range(count):
        kept.put_back()
        file = chance.choice(kept.files())
        with file.open("r+b") as data:
            data.truncate(chance.randrange(file.stat().st_size))
        misses += kept.check() < kept.held
    return misses


def test_a_bit_that_flipped(kept: Kept) -> None:
    """Nearly always a miss: mlx-lm's copies of numbers are read by nobody here."""
    assert flip_some(kept, 12, "some") >= 9
    assert disk_counts(kept.app)["disk_damaged"] > 0


def test_a_file_that_was_cut(kept: Kept) -> None:
    assert cut_some(kept, 6, "some") == 6


def test_a_part_that_is_missing(kept: Kept) -> None:
    """Of the second slot: the first one still serves."""
    for part in ("cache", "meta", "tokens"):
        kept.put_back()
        (file,) = kept.root.glob(f"*/slot_2_{part}.*")
        file.unlink()
        assert kept.check() in (112, 111)


def test_a_damaged_end_leaves_the_beginning(kept: Kept) -> None:
    kept.put_back()
    (file,) = kept.root.glob("*/slot_2_cache.*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert kept.check() in (112, 111)
    assert list(kept.root.glob("*/slot_2_*.bad"))
    kept.look()
    assert kept.check() > 0


def test_foreign_files(kept: Kept) -> None:
    """Names that look like slots, folders of the same, links to nowhere."""
    kept.put_back()
    folder = kept.files()[0].parent
    (folder / "slot_9_cache.safetensors").write_bytes(b"x" * 100)
    (folder / "slot_9_meta.json").write_text("{}")
    (folder / "slot_9_tokens.safetensors").write_bytes(b"\x00" * 9)
    (folder / "slot_10_tokens.safetensors").mkdir()
    (folder / "slot_11_tokens.safetensors").symlink_to("/nonexistent")
    for part in ("cache.safetensors", "meta.json"):
        (folder / f"slot_10_{part}").write_bytes(b"")
        (folder / f"slot_11_{part}").write_bytes(b"")
    (folder / f"slot_{'9' * 30}_meta.json").write_text("")
    (folder / "slot_-1_meta.json").write_text("")
    (folder / "readme.txt").write_text("hello")
    assert kept.check() == kept.held


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_thousands_of_flips(kept: Kept) -> None:
    assert flip_some(kept, 5000 // len(KINDS) + 1, "many") > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_hundreds_of_cuts(kept: Kept) -> None:
    assert cut_some(kept, 500 // len(KINDS) + 1, "many") > 0


@pytest.mark.parametrize("part", ["tokens", "meta", "cache"])
def test_a_pipe_in_a_slots_place(part: str, kept: Kept) -> None:
    """Whoever reads one waits for ever: it is no slot."""
    kept.put_back()
    (file,) = kept.root.glob(f"*/slot_1_{part}.*")
    file.unlink()
    os.mkfifo(file)
    kept.check()


@pytest.mark.parametrize("name", ["digests.json", "written.json"])
@pytest.mark.parametrize(
    "words", ["[" * 200_000, '{"day": 1, "bytes": 1e400}', "7", "\udcff", None]
)
def test_small_files_that_are_none(
    name: str, words: str | None, model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """Deep, odd, no text, or a pipe: answers, and slots, all the same."""
    tmp_path.mkdir(exist_ok=True)
    if words is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(words.encode("utf-8", "surrogateescape"))
    ids = random_ids(1, 100)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        assert said(ask(app, ids)) == cold("dense", ids)
        flush(app)
    assert slots(tmp_path)


@pytest.mark.parametrize("name", ["salt", "runs", "packed", "crc32", "kept"])
def test_a_meta_that_lacks_something(name: str, kept: Kept) -> None:
    """With sums that fit: it was written by another hand."""
    kept.put_back()
    folder = SlotFolder(kept.files()[0].parent)
    slot = folder.read(1)
    forget_all(folder)
    meta = {k: v for k, v in slot.meta.items() if k not in (name, "_crc32")}
    draft = folder.draft()
    shutil.copy(kept.whole / folder.path.name / "slot_1_cache.safetensors",
                draft.paths["cache"])  # fmt: skip
    folder.describe(draft, None, meta, (slot.ids, slot.canonical))
    with pytest.raises(Damaged):
        folder.commit(draft, None)
    assert kept.check() == 0
