"""A text is cut into what is spoken at once: nothing is lost, nothing is too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.audio.sentences import pieces


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        (" \n\t\n", []),
        ("One sentence.", ["One sentence."]),
        ("One. Two? Three!", ["One. Two? Three!"]),
        ("a line\nanother", ["a line", "another"]),
        ("x" * 700, ["x" * 300, "x" * 300, "x" * 100]),
        ("word " * 100, ["word " * 59 + "word", "word " * 39 + "word"]),
        ("A" * 200 + ". " + "B" * 200 + ".", ["A" * 200 + ".", "B" * 200 + "."]),
    ],
)
def test_pieces(text: str, wanted: list[str]) -> None:
    assert pieces(text) == wanted


@given(st.text(alphabet="ab .!?\n。é ", max_size=2000))
def test_nothing_is_lost_and_nothing_is_too_long(text: str) -> None:
    found = pieces(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(0 < len(piece) <= 300 and piece.strip() for piece in found)
