"""
Any sequence of requests with restarts in between, against a model without a cache.

    pytest -m slow -n 0 -s tests/disk/test_disk_oracle.py

plays ORACLE_REQUESTS (2,000) of them on models of each kind.
"""

import os
from pathlib import Path

import pytest

from sidecar.core import lasting_secret
from testkit.kept_kv import disk_settings
from testkit.oracle import Totals
from testkit.oracle_play import Script, play_many
from testkit.oracle_restarts import RestartingPlayer, disk_of
from testkit.oracle_rig import running_rig
from testkit.oracle_talk import plan

KINDS = ("dense", "hybrid", "sliding")
LENGTH = 6
SCRIPT = Script(RestartingPlayer, plan)


def settings(root: Path) -> dict[str, str]:
    """Short runs, so that chains are long and ends are joined."""
    asked = disk_settings(root, root, KV_DISK_RUN_TOKENS="150")
    return {name: value for name, value in asked.items() if name != "MODEL_PATH"}


def play(kind: str, folder: Path, seeds: list[str]) -> tuple[Totals, int, list[str]]:
    """Sequences; the totals, tokens that came from the disk, what was wrong."""
    before = lasting_secret._secret
    try:
        with running_rig(folder, kind, **settings(folder / "kv")) as rig:
            totals, report = play_many(rig, seeds, LENGTH, script=SCRIPT)
            counts = disk_of(rig).counters()
        assert counts["disk_damaged"] == 0
        return totals, counts["disk_tokens_restored"], report
    finally:
        lasting_secret.use_secret(before)


@pytest.mark.parametrize("kind", KINDS)
def test_restarts_change_nothing(kind: str, tmp_path: Path) -> None:
    seeds = [f"disk/{kind}/{number}" for number in range(8)]
    totals, restored, report = play(kind, tmp_path, seeds)
    print(f"\n{kind}: restored={restored} {totals}")
    assert report == []
    assert totals.mismatches == 0
    assert restored > 1000
    assert totals.spliced > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_requests(kind: str, tmp_path: Path) -> None:
    seed = os.environ.get("ORACLE_SEED", "1")
    wanted = int(os.environ.get("ORACLE_REQUESTS", "2000")) // len(KINDS) + 1
    total, from_disk, number = Totals(), 0, 0
    while total.requests < wanted:
        seeds = [f"{seed}/{kind}/{number + i}" for i in range(20)]
        totals, restored, report = play(kind, tmp_path / str(number), seeds)
        assert not report, "\n".join(report)
        total.add(totals)
        number, from_disk = number + 20, from_disk + restored
    print(f"\n{kind}: restored={from_disk} {total}")
    assert total.mismatches == 0
