"""Stop strings: found wherever the text is cut, never shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.output.stop_strings import StopStrings


def run(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    """What is shown of the pieces, and the stop string that ended them."""
    watch = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, stop = watch.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + watch.flush(), None


def expected(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """str.find on the whole: the match that ends first, of those the longest."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return text, None
    _, at, stop = min(found)
    return text[:at], stop


# Few letters, so that matches, near matches and overlaps are common.
pieces_of_text = st.lists(st.text("ab\n", max_size=6), max_size=8)
stop_sets = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4).map(tuple)


@given(pieces=pieces_of_text, stops=stop_sets)
def test_any_chunking_is_find_on_the_whole(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    """However the text is cut, the end is where str.find finds it in the whole."""
    assert run(pieces, stops) == expected("".join(pieces), stops)


@given(pieces=pieces_of_text, stops=stop_sets)
def test_no_stop_string_is_ever_shown(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    """What is shown holds no stop string, and is followed by the one reported."""
    shown, stop = run(pieces, stops)
    assert not any(s in shown for s in stops)
    assert "".join(pieces).startswith(shown + (stop or ""))


def test_held_text_is_the_min_possible() -> None:
    """Only a suffix that can begin a stop string waits for the next piece."""
    watch = StopStrings(("END",))
    assert watch.feed("abcEN") == ("abc", None)
    assert watch.feed("x") == ("ENx", None)
    assert watch.flush() == ""


@pytest.mark.parametrize("pieces", [["aab"], ["a", "a", "b"], ["aa", "b"]])
def test_a_restarting_match_is_found(pieces: list[str]) -> None:
    """`aab` holds `ab` though the first a led nowhere."""
    assert run(pieces, ("ab",)) == ("a", "ab")
