"""
Any sequence of requests, restarts and forgettings, against a model without a cache.

    pytest -m slow -n 0 -s tests/disk/test_forget_oracle.py

plays ORACLE_REQUESTS (2,000) of them on models of each kind.
"""

from pathlib import Path

import pytest

from testkit.oracle_forgets import ForgettingPlayer, ForgetTotals
from testkit.oracle_play import Script, play_many, play_share
from testkit.oracle_restarts import kept_rig
from testkit.oracle_talk import plan

KINDS = ("dense", "hybrid", "sliding")
LENGTH = 10
SCRIPT = Script(ForgettingPlayer, plan, ForgetTotals)


def play(kind: str, folder: Path, seeds: list[str]) -> ForgetTotals:
    """Sequences; the totals, of which none is wrong."""
    with kept_rig(folder, kind, run_tokens=64) as rig:
        totals, report = play_many(rig, seeds, LENGTH, script=SCRIPT)
    assert not report, "\n".join(report)
    assert isinstance(totals, ForgetTotals)
    return totals


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_forgotten_and_all_of_the_others(
    kind: str, tmp_path: Path
) -> None:
    totals = play(kind, tmp_path, [f"forget/{kind}/{n}" for n in range(8)])
    print(f"\n{kind}: {totals}")
    assert totals.forgettings > 8
    assert totals.kept > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_requests(kind: str, tmp_path: Path) -> None:
    total = ForgetTotals()
    play_share(play, total, kind, len(KINDS), tmp_path)
    print(f"\n{kind}: {total}")
    assert total.mismatches == 0
