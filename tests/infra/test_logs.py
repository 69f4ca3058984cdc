"""A line in the terminal is one line, whatever is told in it."""

import io
import logging

import pytest

from sidecar.infra import logs

FORGED = "x\r\n12:00:00 INFO sidecar [-] all is well\x1b[2J\x9b31m\u2028\u202e"


def told(caplog_text: object, *, colour: bool = False, error: bool = False) -> str:
    """What a record comes to in the terminal."""
    out = io.StringIO()
    handler = logs.make_handler(out, colour=colour)
    try:
        raise ValueError(FORGED)
    except ValueError as fault:
        where = (type(fault), fault, fault.__traceback__) if error else None
    record = logging.LogRecord(
        "sidecar", logging.INFO, "f", 1, "said %s", (caplog_text,), where
    )
    handler.handle(record)
    return out.getvalue()


def test_what_a_stranger_sends_makes_no_line_and_moves_no_cursor() -> None:
    line = told(FORGED)
    assert line.count("\n") == 1
    assert line.isascii()
    assert "\x1b" not in line
    assert "\\x1b[2J" in line


def test_lines_of_a_traceback_are_indented() -> None:
    """So that none can be taken for a record."""
    first, *rest = told("a", error=True).splitlines()
    assert first.endswith("said a")
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)
    assert any("all is well" in line for line in rest)


def test_words_in_other_scripts_are_shown() -> None:
    assert "said Grüße, 世界 ✓" in told("Grüße, 世界 ✓")


@pytest.mark.parametrize("light", ["green", "yellow", "red", "new"])
def test_the_light_has_its_colour_in_a_terminal(light: str) -> None:
    """And its name elsewhere; nobody else's words are coloured."""
    assert f"light={light}" in told(f"request started light={light} match=none")
    line = told(f"x light={light} match=none", colour=True)
    assert f"\x1b[{logs.COLOURS[light]}m●\x1b[0m {light} match" in line


@pytest.mark.parametrize(
    ("is_terminal", "environ", "expected"),
    [(True, {}, True), (False, {}, False), (False, {"FORCE_COLOR": "1"}, True),
     (True, {"NO_COLOR": "1"}, False), (False, {"FORCE_COLOR": "0"}, False),
     (True, {"TERM": "dumb"}, False), (True, {"NO_COLOR": ""}, True)],
)  # fmt: skip
def test_who_wants_colours(
    is_terminal: bool, environ: dict[str, str], expected: bool
) -> None:
    assert logs.wants_colour(is_terminal, environ) is expected
