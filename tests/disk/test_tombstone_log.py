"""A file of lines that is appended to by several processes, and cut off by crashes."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.core.conversation import Conversation
from sidecar.kv.disk import durable_files, tombstone_log
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.kv.disk.tombstone_log import LOG_NAME, TombstoneLog
from sidecar.memory.tombstones import Context, Tombstones, place_keys
from testkit.kept_kv import kept_sidecar, leased
from testkit.raw_http import eventually


class Lines:
    """Marks that are their lines."""

    def __init__(self, *new: str) -> None:
        self.new = list(new)
        self.known: list[str] = []

    def unlogged(self) -> list[str]:
        return list(self.new)

    def logged(self, lines: list[str]) -> None:
        self.new = [line for line in self.new if line not in lines]

    def lines(self) -> list[str]:
        return ["all"]

    def write_again(self) -> None:
        self.new = [*self.known, *self.new]

    def clear(self) -> None:
        self.known = []

    def learn(self, lines: list[str]) -> None:
        self.known += lines


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


def test_two_processes_tell_each_other(folder: SlotFolder) -> None:
    """And nothing twice."""
    one, two = Lines("a", "b"), Lines("c")
    logs = TombstoneLog(folder, one), TombstoneLog(folder, two)
    logs[0].read()  # there is none
    for _ in range(2):
        for log in logs:
            log.write()
            log.read()
        assert (folder.path / LOG_NAME).read_text() == "a\nb\nc\n"
    logs[0].read()
    assert one.known == ["a", "b", "c"]
    assert two.known == ["a", "b", "c"]
    assert (folder.path / LOG_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_line_that_was_cut_off_harms_no_other(folder: SlotFolder, cut: int) -> None:
    """A process was killed as it wrote; another had read what was there."""
    marks = Lines("first", "second")
    path = folder.path / LOG_NAME
    TombstoneLog(folder, marks).write()
    other = Lines()
    log = TombstoneLog(folder, other)
    log.read()
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"torn li"[:cut])
    log.read()
    assert other.known == ["first", "second"]
    TombstoneLog(folder, Lines("third")).write()
    log.read()
    assert other.known == ["first", "second", "torn li"[:cut], "third"]


def test_a_file_that_grew_too_large_is_written_anew(folder: SlotFolder) -> None:
    """With all that is known, of other processes as well; a reader begins again."""
    path, reader = folder.path / LOG_NAME, Lines()
    path.write_text("of another process\n")
    log = TombstoneLog(folder, reader)
    log.read()
    marks = Lines("a")
    TombstoneLog(folder, marks, max_bytes=5).write()
    assert marks.known == ["of another process"]
    assert path.read_text().splitlines()[1:] == ["all"]
    assert sorted(os.listdir(folder.path)) == [".lock", LOG_NAME]
    log.read()
    assert reader.known == [
        "of another process",
        path.read_text().splitlines()[0],
        "all",
    ]


def test_a_file_in_its_place_is_read_from_its_beginning(folder: SlotFolder) -> None:
    """All was forgotten, and more was said; a disk gives numbers of files again."""
    path, reader = folder.path / LOG_NAME, Lines()
    log = TombstoneLog(folder, reader)
    path.write_text("a\n")
    log.read()
    path.write_text("b\nc\n")
    log.read()
    assert reader.known == ["a", "b", "c"]


def test_what_cannot_be_written_is_written_later(folder: SlotFolder) -> None:
    marks = Lines("a")
    path = folder.path / LOG_NAME
    path.mkdir()
    log = TombstoneLog(folder, marks)
    with pytest.raises(OSError, match="no file|directory"):
        log.write()
    assert marks.new == ["a"]
    path.rmdir()
    log.write()
    assert (path.read_text(), marks.new) == ("a\n", [])


def test_what_is_known_is_written_again_where_the_file_is_gone(
    folder: SlotFolder,
) -> None:
    """Another process has forgotten all; this one still knows what is hidden."""
    marks = Lines("a")
    log = TombstoneLog(folder, marks)
    log.write()
    log.read()
    (folder.path / LOG_NAME).unlink()
    log.read()
    log.write()
    assert (folder.path / LOG_NAME).read_text() == "a\n"


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_no_file_is_neither_read_nor_written_and_leaks_nothing(
    folder: SlotFolder, kind: str
) -> None:
    path, other = folder.path / LOG_NAME, folder.path / "other"
    other.touch()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(other)
    log = TombstoneLog(folder, Lines("a"))
    before = len(os.listdir("/dev/fd"))
    for act in (log.read, log.write):
        for _ in range(3):
            with pytest.raises(OSError, match=r"no file|directory|symbolic"):
                act()
    assert len(os.listdir("/dev/fd")) == before
    assert other.read_text() == ""


def test_lines_are_on_the_disk_when_they_count_as_written(
    folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, and before anybody is told so."""
    marks = Lines("a", "b")
    synced: list[tuple[bytes, list[str]]] = []

    def sync(file: io.FileIO) -> None:
        durable_files.make_durable(file)
        synced.append(((folder.path / LOG_NAME).read_bytes(), marks.unlogged()))

    monkeypatch.setattr(tombstone_log, "make_durable", sync)
    TombstoneLog(folder, marks).write()
    assert synced == [(b"a\nb\n", ["a", "b"])]


def test_nobody_waits_for_a_pipe(folder: SlotFolder) -> None:
    os.mkfifo(folder.path / LOG_NAME)
    marks = Lines()
    with pytest.raises(OSError, match="no file"):
        TombstoneLog(folder, marks).read()
    assert marks.known == []


def test_a_running_process_learns_of_another_s_by_itself(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """No request of its own is needed: it looks again and again."""
    model, root = model_folder("dense"), tmp_path / "kv"
    with kept_sidecar(root, model) as one, kept_sidecar(root, model) as two:
        mine, theirs = map(tombstones_of, (one, two))
        keys = place_keys(
            "v", Context("c", "l", "a", "a"), Conversation(None, "s", "t")
        )
        before = theirs.now()
        mine.bury(keys.broken_off)
        assert eventually(lambda: theirs.hides(keys, before), 60)


def tombstones_of(app: App) -> Tombstones:
    with leased(app) as resident:
        assert resident.disk is not None
        assert resident.disk.wait_open(60)
        return resident.memory.tombstones
