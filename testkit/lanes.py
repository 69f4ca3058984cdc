"""
Which tests a run of pytest has: the fast lane, the rest, or all that is named.

tests/rest.txt says what the fast lane leaves out.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "tests" / "rest.txt"
_BY_HAND = "not slow and not model"


def rest_patterns() -> list[str]:
    """The lines of tests/rest.txt that are no comments."""
    lines = (line.strip() for line in _FILE.read_text("utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def matching(patterns: Iterable[str]) -> re.Pattern[str]:
    """Matches the ids of the tests that patterns of tests/rest.txt name."""
    parts = (re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
    return re.compile(f"tests/(?:{'|'.join(parts)})")


def mark_rest(items: list[pytest.Item]) -> None:
    """Give the tests that tests/rest.txt names the mark `rest`."""
    rest = matching(rest_patterns())
    for item in items:
        if rest.match(item.nodeid):
            item.add_marker(pytest.mark.rest)


def choose_lane(config: pytest.Config) -> None:
    """
    Write the lane into pytest's own selection by marks.

    A selection of a person's (-m) is taken as it is. What is named (a file, a test, -k)
    runs whole, and without a name it is the fast lane. Workers of xdist read the same
    command line, and choose the same.
    """
    if config.option.markexpr:
        return
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    if config.option.rest:
        lane = f"rest and {_BY_HAND}"
    elif is_named or config.option.keyword:
        lane = _BY_HAND
    else:
        lane = f"not rest and {_BY_HAND}"
    config.option.markexpr = lane
