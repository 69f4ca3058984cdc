"""The benchmark of drafts on a git repository, and what the benchmarks refuse."""

import subprocess
from pathlib import Path

import pytest

from bench.__main__ import main

_LINES = [f"value_{number} = compute({number}, {number * 7919 % 1000})\n"
          for number in range(60)]  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Four commits of one file, each of which changes a line of it."""
    folder = tmp_path / "project"
    folder.mkdir()

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        command = ["git", *who, "-C", str(folder), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    git("init", "-q")
    for number in range(4):
        changed = [*_LINES]
        changed[10 * number] = f"value_{10 * number} = computed_otherwise\n"
        (folder / "values.py").write_text("".join(changed))
        git("add", "values.py")
        git("commit", "-q", "-m", f"Change {number}")
    return folder


def test_tokens_a_call_of_a_repository_are_told(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole files and edits, in both forms; saved commits give the same."""
    saved = str(tmp_path / "commits.json")
    assert main(["speculation", str(repository), "--save", saved]) == 0
    head, _columns, *rows = capsys.readouterr().out.splitlines()
    assert head == f"3 commits of {repository}"
    rates = {row[:22].strip(): float(row.split()[-1]) for row in rows}
    assert [*rates] == ["whole file in JSON", "edit in JSON",
                        "whole file in XML", "edit in XML"]  # fmt: skip
    assert all(rate > 2.4 for rate in rates.values()), rates
    assert rates["whole file in JSON"] > 6
    assert main(["speculation", saved]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [_columns, *rows]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["speculation", "FOLDER"], "is no git repository"),
        (["speculation", "FOLDER", "--price", "0"], "must be a number above 0"),
        (["speculation", "FOLDER", "--commits", "0"], "must be 1 or more"),
        (["streams", "--streams", "0"], "must be 1 or more"),
        (["streams", "--streams", "1,x"], "must be 1 or more"),
        (["gaps", "--max-tokens", "1"], "must be 2 or more"),
        (["gaps", "--every", "inf"], "must be a number above 0"),
        (["start", "--rounds", "0"], "must be 1 or more"),
        (["kept", "--rounds", "0"], "must be 1 or more"),
        (["structured", "--rounds", "0"], "must be 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is started: exit 2, with the option and its range."""
    given = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
