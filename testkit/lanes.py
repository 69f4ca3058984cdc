"""
Which tests a run of pytest has: the fast lane, the rest, the further, or what is named.

tests/rest.txt says what the fast lane leaves out, tests/further.txt what CI does.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1] / "tests"
LANES = ("rest", "further")  # a test that both name is in the last one
_BY_HAND = "not slow and not model"
_COLLECTED = pytest.StashKey[frozenset[str]]()


def patterns_of(lane: str) -> list[str]:
    """The lines of a lane's file that are no comments."""
    text = (_TESTS / f"{lane}.txt").read_text("utf-8")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def matching(patterns: Iterable[str]) -> re.Pattern[str]:
    """Matches the ids of the tests that patterns name."""
    parts = (re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
    return re.compile(f"tests/(?:{'|'.join(parts)})")


def mark_lanes(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test that is not in the fast lane the mark of its lane."""
    config.stash[_COLLECTED] = frozenset(
        item.nodeid
        for item in items
        if not any(map(item.get_closest_marker, ("slow", "model")))
    )
    found = {lane: matching(patterns_of(lane)) for lane in reversed(LANES)}
    for item in items:
        lane = next((name for name in found if found[name].match(item.nodeid)), None)
        if lane is not None:
            item.add_marker(lane)


def collected_here(config: pytest.Config) -> frozenset[str] | None:
    """
    The ids of all tests that no mark keeps from the lanes, as this run collected them.

    Returns:
        None where this run was given names of files or tests: it has not seen all.
    """
    return None if _is_named(config) else config.stash[_COLLECTED]


def _is_named(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.ARGS


def choose_lane(config: pytest.Config) -> None:
    """
    Write the lane into pytest's own selection by marks.

    A selection of a person's (-m) is taken as it is. What is named (a file, a test, -k)
    runs whole, and without a name it is the fast lane. Workers of xdist read the same
    command line, and choose the same.
    """
    if config.option.markexpr:
        return
    if config.option.lane:
        lane = f"{config.option.lane} and {_BY_HAND}"
    elif _is_named(config) or config.option.keyword:
        lane = _BY_HAND
    else:
        lane = f"not rest and not further and {_BY_HAND}"
    config.option.markexpr = lane
