"""
Any sequence of requests with restarts in between, against a model without a cache.

    pytest -m slow -n 0 -s tests/disk/test_disk_oracle.py

plays ORACLE_REQUESTS (2,000) of them on models of each kind.
"""

from pathlib import Path

import pytest

from testkit.oracle_play import Script, play_many, play_share
from testkit.oracle_restarts import (
    RestartingPlayer,
    RestartTotals,
    disk_of,
    kept_rig,
)
from testkit.oracle_talk import plan

KINDS = ("dense", "hybrid", "sliding")
LENGTH = 6
SCRIPT = Script(RestartingPlayer, plan, RestartTotals)


def play(kind: str, folder: Path, seeds: list[str]) -> RestartTotals:
    """Sequences; the totals, of which none is wrong."""
    with kept_rig(folder, kind, run_tokens=150) as rig:
        totals, report = play_many(rig, seeds, LENGTH, script=SCRIPT)
        counts = disk_of(rig).counters()
    assert counts["disk_damaged"] == 0
    assert not report, "\n".join(report)
    assert isinstance(totals, RestartTotals)
    totals.restored = counts["disk_tokens_restored"]
    return totals


@pytest.mark.parametrize("kind", KINDS)
def test_restarts_change_nothing(kind: str, tmp_path: Path) -> None:
    seeds = [f"disk/{kind}/{number}" for number in range(8)]
    totals = play(kind, tmp_path, seeds)
    print(f"\n{kind}: {totals}")
    assert totals.mismatches == 0
    assert totals.restored > 1000
    assert totals.spliced > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_requests(kind: str, tmp_path: Path) -> None:
    total = RestartTotals()
    play_share(play, total, kind, len(KINDS), tmp_path)
    print(f"\n{kind}: {total}")
    assert total.mismatches == 0
