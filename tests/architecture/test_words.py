"""
One word for one thing: words of earlier drafts that no identifier may have again.

What stands for each now: docs/architecture.md, "Words".
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
WORDS = {
    "told", "whose", "asker", "keepsake", "guest", "eyes", "blindness", "lanes",
    "retell", "recalled", "handover", "speaker", "lend", "lent", "adopt", "promise",
    "promised",
}  # fmt: skip
CLASSES = {
    "Whose", "Asker", "Owner", "Promise", "Said", "Opening", "Keepsake", "Due",
    "DueList", "HandOver", "Wanted", "Unwanted", "Question", "Form", "Answer",
    "Recalled", "Frame", "FrameCache", "Lanes", "Turns", "Held", "Offer", "Found",
    "Entry", "Kept", "Room", "Places",
}  # fmt: skip
SOURCES = sorted((REPO / "sidecar").rglob("*.py")) + sorted(
    (REPO / "litellm_mlx").rglob("*.py")
)


def parts(name: str) -> set[str]:
    """The words of a name, in whatever case it is written."""
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def names(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO)))
def test_no_identifier_has_a_word_of_an_earlier_draft(path: Path) -> None:
    assert {name for name in names(path) if parts(name) & WORDS} == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO)))
def test_no_class_has_a_name_of_an_earlier_draft(path: Path) -> None:
    classes = set(re.findall(r"^class _?(\w+)", path.read_text(), re.MULTILINE))
    assert classes & CLASSES == set()


def test_names_are_read_by_their_words() -> None:
    assert parts("_lentTo") >= {"lent", "to"}
    assert parts("ToldNames") == {"told", "names"}


def test_no_two_classes_have_one_name() -> None:
    """Of both packages, private ones too: a name that is searched for is found once."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in re.findall(r"^\s*class (\w+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(str(path.relative_to(REPO)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
