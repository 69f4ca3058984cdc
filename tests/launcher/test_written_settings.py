"""A client's settings file, written on request and put back."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_mlx.launcher.clients import json_file
from litellm_mlx.launcher.clients.json_file import without_secrets
from litellm_mlx.launcher.clients.user_files import Unreadable
from litellm_mlx.launcher.clients.written_settings import (
    Journal,
    NotTouched,
    planned,
    undo,
    write,
)

KEYS = {"env": {"URL": "http://127.0.0.1:1", "KEY": "k"}, "model": "local"}
TEXT = '{\n    "env": {"MINE": "1", "URL": "other"},\n    "zahl": 1.50, "ü": []\n}'
_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
_OBJECTS = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        _LEAVES, lambda inner: st.dictionaries(st.sampled_from("abcd"), inner)
    ),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    path.write_text(TEXT)
    path.chmod(0o640)
    return path


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


def test_keys_are_added_and_all_else_stays(file: Path, journal: Journal) -> None:
    """Mode and indentation too; the copy beside it is what it was."""
    copy = write("it", planned(file, KEYS), journal)
    assert copy is not None
    assert copy.read_text() == TEXT
    assert copy.name.startswith("settings.json.litellm-mlx-")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert json.loads(file.read_text()) == {
        "env": {"MINE": "1", "URL": "http://127.0.0.1:1", "KEY": "k"},
        "zahl": 1.5, "ü": [], "model": "local",
    }  # fmt: skip
    assert file.read_text().startswith('{\n    "env"')
    assert "ü" in file.read_text()
    with pytest.raises(NotTouched, match="launch --undo it first"):
        write("it", planned(file, KEYS), journal)
    undo("it", journal)
    assert file.read_text() == TEXT
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [p.name for p in file.parent.glob("*.bak")] == []
    with pytest.raises(NotTouched, match="nothing was written"):
        undo("it", journal)


def test_a_file_that_was_not_there_goes_again(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "deep/settings.json"
    assert write("it", planned(path, KEYS), journal) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    undo("it", journal)
    assert not path.exists()


def test_what_others_changed_since_is_left(file: Path, journal: Journal) -> None:
    """Of our keys those go that are still ours."""
    write("it", planned(file, KEYS), journal)
    value = json.loads(file.read_text())
    value["model"] = "his"
    value["env"]["NEW"] = "2"
    file.write_text(json.dumps(value))
    assert "has changed since" in undo("it", journal)
    assert json.loads(file.read_text()) == {
        "env": {"MINE": "1", "URL": "other", "NEW": "2"},
        "zahl": 1.5, "ü": [], "model": "his",
    }  # fmt: skip


def test_what_cannot_be_told_apart_is_not_touched(file: Path, journal: Journal) -> None:
    """Both versions are named, and undoing can be tried again."""
    write("it", planned(file, KEYS), journal)
    good = file.read_text()
    file.write_text("// a comment\n" + good)
    with pytest.raises(NotTouched, match=r"by hand .*\.bak"):
        undo("it", journal)
    assert file.read_text() == "// a comment\n" + good
    file.write_text(good)
    undo("it", journal)
    assert file.read_text() == TEXT


def test_a_file_that_is_gone_does_not_come_back(file: Path, journal: Journal) -> None:
    copy = write("it", planned(file, KEYS), journal)
    assert copy is not None
    file.unlink()
    assert str(copy) in undo("it", journal)
    assert not file.exists()
    assert copy.read_text() == TEXT


def test_a_write_that_was_killed_is_undone(
    file: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the note, before the file."""
    module = "litellm_mlx.launcher.clients.written_settings.replace_file"

    def replace(path: Path, *_: object) -> None:
        if path == file:
            raise KeyboardInterrupt
        path.write_text(TEXT)

    monkeypatch.setattr(module, replace)
    with pytest.raises(KeyboardInterrupt):
        write("it", planned(file, KEYS), journal)
    monkeypatch.undo()
    assert file.read_text() == TEXT
    assert "is as it was" in undo("it", journal)
    write("it", planned(file, KEYS), journal)


def test_a_change_in_between_is_seen(file: Path, journal: Journal) -> None:
    change = planned(file, KEYS)
    file.write_text("{}")
    with pytest.raises(NotTouched, match="changed meanwhile"):
        write("it", change, journal)
    assert file.read_text() == "{}"
    assert journal.find("it") is None


def test_a_link_leads_to_the_file(file: Path, journal: Journal) -> None:
    """Of those who keep their settings elsewhere: the link stays."""
    link = file.parent / "link.json"
    link.symlink_to(file)
    write("it", planned(link, KEYS), journal)
    assert link.is_symlink()
    assert "local" in file.read_text()


@pytest.mark.parametrize(
    "text",
    ["// one\n{}", "{'a': 1}", '{"a": 1,}', '{"a": 1, "a": 2}', '{"a": NaN}',
     '{"a": 1e999}', "[]", "\ufeff{}", '{"a": ' + "[" * 990 + "]" * 990 + "}",
     "", '{"env": "x"}', '{"a": "\\ud800"}'],
)  # fmt: skip
def test_what_is_no_strict_json_is_never_written(file: Path, text: str) -> None:
    file.write_text(text)
    if not text:
        assert planned(file, KEYS).after  # as if it were not there
        return
    with pytest.raises(Unreadable):
        planned(file, KEYS)


def test_a_read_only_file_is_left_alone(file: Path) -> None:
    os.chmod(file, 0o444)
    with pytest.raises(NotTouched, match="is read-only"):
        planned(file, KEYS)


def test_no_key_is_shown(file: Path) -> None:
    """Neither ours nor the user's, in whatever characters and on whatever line."""
    file.write_text(
        '{"env":{"ANTHROPIC_AUTH_TOKEN":"sk-his","MAX_TOKENS":"9"},"z":"ü"}'
    )
    ours = {"env": {"ANTHROPIC_AUTH_TOKEN": 'schl\u00fcssel"x'}, "apiKey": "any"}
    said = planned(file, ours).difference()
    assert "sk-his" not in said
    assert "schl" not in said
    assert '"apiKey": "***"' in said
    assert '"MAX_TOKENS": "9"' in said


@pytest.mark.parametrize("text", ['{"evil": 1}', "", "no json"])
def test_a_copy_that_was_changed_is_not_put_back(
    file: Path, journal: Journal, text: str
) -> None:
    copy = write("it", planned(file, KEYS), journal)
    assert copy is not None
    written = file.read_text()
    copy.write_text(text)
    with pytest.raises(NotTouched, match="no longer what it was"):
        undo("it", journal)
    assert file.read_text() == written


def test_the_copy_of_a_changed_file_stays(file: Path, journal: Journal) -> None:
    """It alone has the numbers as the user wrote them."""
    copy = write("it", planned(file, KEYS), journal)
    assert copy is not None
    file.write_text(file.read_text().replace("zahl", "number"))
    assert str(copy) in undo("it", journal)
    assert copy.read_text() == TEXT


def test_undoing_goes_through_a_link_that_was_made_since(
    file: Path, journal: Journal
) -> None:
    write("it", planned(file, KEYS), journal)
    moved = file.rename(file.parent / "dotfile.json")
    file.symlink_to(moved)
    undo("it", journal)
    assert file.is_symlink()
    assert moved.read_text() == TEXT


def test_a_full_disk_leaves_nothing(
    file: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a note nor a copy, so that it can be tried again."""
    module = "litellm_mlx.launcher.clients.written_settings.replace_file"

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, fail)
    with pytest.raises(OSError, match="No space"):
        write("it", planned(file, KEYS), journal)
    monkeypatch.undo()
    assert [*file.parent.glob("*.bak")] == []
    write("it", planned(file, KEYS), journal)


def test_objects_are_wanted_at_every_depth(file: Path) -> None:
    file.write_text('{"security": {"auth": [1]}}')
    with pytest.raises(Unreadable, match="auth of"):
        planned(file, {"security": {"auth": {"selectedType": "openai"}}})


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "hard link"])
def test_what_is_no_plain_file_is_left_alone(file: Path, kind: str) -> None:
    """A pipe would hold the command for ever; a second name would keep the old text."""
    if kind == "hard link":
        os.link(file, file.parent / "second.json")
    else:
        file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    with pytest.raises(NotTouched):
        planned(file, KEYS)


def test_a_copy_or_a_note_that_is_lost_is_named(file: Path, journal: Journal) -> None:
    copy = write("it", planned(file, KEYS), journal)
    assert copy is not None
    copy.unlink()
    with pytest.raises(NotTouched, match=str(journal.path("it"))):
        undo("it", journal)
    journal.path("it").write_text("{}")
    with pytest.raises(NotTouched, match="cannot be read"):
        undo("it", journal)
    assert "local" in file.read_text()


@given(before=_OBJECTS, keys=_OBJECTS)
def test_taking_out_is_the_opposite(
    before: dict[str, Any], keys: dict[str, Any]
) -> None:
    """But where keys took the place of something else: then it is that again."""
    after = json_file.merged(before, keys)
    assert json_file.without(after, keys, before) == before


def test_secrets_are_masked_and_what_is_empty_is_shown() -> None:
    shown = without_secrets('{"ANTHROPIC_API_KEY": "", "X-Auth": "a\\"b", "name": "c"}')
    assert shown == '{"ANTHROPIC_API_KEY": "", "X-Auth": "***", "name": "c"}'
