"""Matching a run of literals and spans with the text that it should give."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.pipeline.template.elements import Run, match_run
from sidecar.volatile.marked_message import Span


def span(value: str, kind: str = "tail_ws", *, is_quoted: bool = False) -> Span:
    return Span(kind, 0, 0, value, is_quoted=is_quoted)


def text_of(run: Run) -> str:
    return "".join(e if isinstance(e, str) else e.printed(e.value) for e in run)


SPACE = st.text("\n ", max_size=3)
ELEMENTS = st.one_of(
    st.text("ab\n ", max_size=4),
    st.builds(span, SPACE, st.sampled_from(["tail_ws", "edge_ws", "note"])),
    st.builds(span, SPACE, is_quoted=st.just(True)),
)


@given(st.lists(ELEMENTS, max_size=12), st.randoms(use_true_random=False))
def test_a_text_that_the_run_gives_is_always_found(
    run: list[str | Span], chance: Random
) -> None:
    """Whichever white space a template has trimmed."""
    trimmed = [
        "" if isinstance(e, Span) and e.kind != "note" and chance.random() < 0.5
        else e if isinstance(e, str) else e.printed(e.value)
        for e in run
    ]  # fmt: skip
    text = "".join(trimmed)
    found = match_run(run, text)
    assert found is not None
    assert text_of(found) == text


@given(st.lists(ELEMENTS, max_size=6), st.text("ab\n ", max_size=8))
def test_no_other_text_is(run: list[str | Span], text: str) -> None:
    """A run is found in just those texts that some choice of its values gives."""
    options = [
        {"", e.printed(e.value)} if isinstance(e, Span) and e.kind != "note"
        else {e if isinstance(e, str) else e.value}
        for e in run
    ]  # fmt: skip
    possible = {"".join(chosen) for chosen in product(*options)}
    assert (match_run(run, text) is not None) is (text in possible)


def test_a_text_that_never_fits_is_given_up() -> None:
    """However many ways there are to try."""
    run = [span("\n") for _ in range(60)]
    assert match_run([*run, "x"], "\n" * 30 + "y") is None


@pytest.mark.parametrize("value", ["\n", " \n"])
def test_the_value_is_the_clients_not_the_printed_one(value: str) -> None:
    """So that it can be said elsewhere, where nothing is escaped."""
    quoted = span(value, is_quoted=True)
    found = match_run(["a", quoted, '"'], "a" + value.replace("\n", "\\n") + '"')
    assert found == ["a", quoted, '"']
