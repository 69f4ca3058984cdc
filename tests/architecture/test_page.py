"""The map of the house shows the house."""

import re
from pathlib import Path

from tools import write_architecture

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "architecture.md"


def test_the_page_is_what_the_modules_say() -> None:
    """Run `python -m tools.write_architecture` after a change."""
    assert write_architecture.architecture_page() == PAGE.read_text(encoding="utf-8")


def test_no_module_is_without_a_purpose() -> None:
    lines = re.findall(r"^- `\w+\.py`:(.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) > 150
    assert all(line.strip().endswith((".", ")")) for line in lines)


def test_each_file_that_the_walk_names_is_there() -> None:
    """By its whole path, or by its name in one of the rooms."""
    walk = PAGE.read_text().partition("## Rooms")[0]
    names = set(re.findall(r"`((?:[\w]+/)*\w+\.py)`", walk))
    files = [p.as_posix() for name in ("sidecar", "litellm_mlx")
             for p in (REPO / name).rglob("*.py")]  # fmt: skip
    assert len(names) > 15
    for name in names:
        assert any(file.endswith(f"/{name}") for file in files), name


def test_the_questions_are_answered_where_it_says() -> None:
    """Each file is there, and defines the name that stands beside it."""
    section = PAGE.read_text(encoding="utf-8").partition("## Where to look first")[2]
    rows = re.findall(r"^\| (.+\?) \| `(.+)` \| `(.+)` \|$", section, re.M)
    assert len(rows) == section.partition("## ")[0].count("\n| ") - 1 >= 25
    for question, file, name in rows:
        text = (REPO / file).read_text(encoding="utf-8")
        defined = rf"^(class |def )?{name}\b[ (:=\[]"
        assert re.search(defined, text, re.M), (question, file, name)


def test_each_path_that_contributors_are_sent_to_is_there() -> None:
    """From the root, or within `sidecar/`; a pattern stands for what it names."""
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders, files = r"(?:[\w.-]+/)+[\w.-]*", r"[\w/-]+\.(?:py|toml|md|txt)"
    paths = set(re.findall(f"`({folders}|{files})", text))
    assert len(paths) > 20
    for path in paths:
        places = (REPO / path, REPO / "sidecar" / path)
        is_named = "/" not in path and any((REPO / "sidecar").rglob(path))
        assert is_named or any(place.exists() for place in places), path
