"""
No picture is taken for another: random agents with images, against mlx-vlm alone.

    pytest -m slow -n 0 -s tests/vision/test_image_oracle.py

plays at least 700 requests on a model of each family that sees; ORACLE_SEED and
ORACLE_REQUESTS (in all) choose others. What fails is told with its seed, and its
sequence made short.
"""

import os
from pathlib import Path

import pytest

from testkit.image_oracle import SEEING, SeeingTotals
from testkit.image_rig import SeeingRig, running_seeing_rig
from testkit.image_talk import ALTERING, SEEING_OPS, plan_seeing
from testkit.oracle_play import play_many
from testkit.tiny_vision import SEEING as KINDS

LENGTH = 5
# Sequences of a CI run by kind: positions on three axes, checkpoints, a window.
SEQUENCES = {"seeing": 7, "seeing-hybrid": 7, "seeing-sliding": 7}
_SLOW_REQUESTS = 2800
_SLOW_LENGTH = 10


def _play(rig: SeeingRig, seeds: list[str], length: int) -> SeeingTotals:
    totals, report = play_many(rig, seeds, length, script=SEEING)
    assert not report, "\n".join(report)
    assert isinstance(totals, SeeingTotals)
    return totals


def _seeds(kind: str) -> list[str]:
    return [f"ci/{kind}/{number}" for number in range(SEQUENCES[kind])]


@pytest.mark.parametrize("kind", SEQUENCES)
def test_a_run_has_all_that_is_done_to_images(kind: str) -> None:
    """A long run has every op there is."""
    played = {op.name for seed in _seeds(kind) for op in plan_seeing(seed, LENGTH)}
    assert {*ALTERING, "beside", "clear", "cancel_within", "tool", "branch"} <= played
    long = {op.name for n in range(60) for op in plan_seeing(f"1/{kind}/{n}", 10)}
    assert long == set(SEEING_OPS)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_no_picture_is_taken_for_another(kind: str, folder: Path) -> None:
    """After each request: what was reused, what was read, and what was computed."""
    with running_seeing_rig(folder / kind) as rig:
        totals = _play(rig, _seeds(kind), LENGTH)
    print(f"\n{kind}: {totals}")
    assert totals.mismatches == 0
    # The run is worth something: all that is to be checked did happen.
    assert totals.cached_tokens > totals.prompt_tokens / 3
    assert totals.seeing > totals.requests / 2
    assert totals.reused_images > totals.images / 6
    for number in ("swapped", "anthropic", "cancelled", "spliced", "mixed"):
        assert getattr(totals, number) > 0, number


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_two_thousand_requests_show_no_difference(folder: Path) -> None:
    """The families take turns, each on a server of its own."""
    seed = os.environ.get("ORACLE_SEED", "1")
    wanted = int(os.environ.get("ORACLE_REQUESTS", str(_SLOW_REQUESTS)))
    total = SeeingTotals()
    for number, kind in enumerate(KINDS, 1):
        share = wanted * number // len(KINDS)
        found = SeeingTotals()
        with running_seeing_rig(folder / kind) as rig:
            while total.requests + found.requests < share:
                name = f"{seed}/{kind}/{found.sequences}"
                found.add(_play(rig, [name], _SLOW_LENGTH))
        total.add(found)
        print(f"\n{kind}: {found}", flush=True)
    print(f"all: {total}")
    assert total.requests >= wanted
    assert total.mismatches == 0
    assert total.retreats > 0
