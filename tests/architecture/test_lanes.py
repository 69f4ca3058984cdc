"""Each lane has what it says, and nothing is in none."""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from testkit.lanes import LANES, collected_here, matching, patterns_of

REPO = Path(__file__).parents[2]
# A file in which one test of three is in the fast lane.
SPLIT = "tests/disk/test_kills.py"
# One with tests of two lanes, of which the rest takes seconds.
QUICK = "tests/server/test_strict_tools.py"


def collected(*arguments: str) -> set[str]:
    """The ids of the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q"]
    ran = subprocess.run(
        [*command, *arguments],
        capture_output=True, text=True, check=False, cwd=REPO, timeout=600,
    )  # fmt: skip
    return {line for line in ran.stdout.splitlines() if "::" in line}


def test_each_line_names_what_is_there(request: pytest.FixtureRequest) -> None:
    """A test that was renamed would come back into the fast lane unseen."""
    found: Collection[str] | None = collected_here(request.config)
    if found is None:
        found = collected("-m", "not slow and not model")
    for lane in reversed(LANES):
        patterns = patterns_of(lane)
        for pattern in patterns:
            assert any(map(matching([pattern]).match, found)), (lane, pattern)
        of_lane = matching(patterns)
        found = {name for name in found if not of_lane.match(name)}


def test_this_very_run_has_chosen_its_lane(request: pytest.FixtureRequest) -> None:
    """In a worker, too, which reads the same command line."""
    options, mark = request.config.option, request.node.get_closest_marker
    if options.lane:
        assert options.markexpr.startswith(f"{options.lane} and not slow")
        assert mark(options.lane)
    assert not mark("slow")


def test_workers_choose_as_one_process_does() -> None:
    """What is in another lane, or runs by hand, does not run in them."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", QUICK, "--rest"]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=REPO, timeout=600
    )
    assert f"{len(collected(QUICK, '--rest'))} passed" in ran.stdout, ran.stdout


def test_what_is_named_runs_whole() -> None:
    """By its file or by a word; each lane has its part of it."""
    whole = collected(SPLIT)
    rest = collected(SPLIT, "--rest")
    assert {name[name.index("[") :] for name in whole - rest} == {"[dense]"}
    assert {name[name.index("[") :] for name in rest} == {"[hybrid]", "[sliding]"}
    by_hand = collected(SPLIT, "-m", "slow")
    assert by_hand
    assert not by_hand & whole
    word = collected("-k", "test_a_killed_process", "--ignore-glob=tests/[!d]*")
    assert word == whole
