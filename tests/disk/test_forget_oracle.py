"""
Any sequence of requests, restarts and forgettings, against a model without a cache.

    pytest -m slow -n 0 -s tests/disk/test_forget_oracle.py

plays ORACLE_REQUESTS (2,000) of them on models of each kind.
"""

import os
from pathlib import Path

import pytest

from sidecar.core import lasting_secret
from testkit.kept_kv import disk_settings
from testkit.oracle_forgets import ForgettingPlayer, ForgetTotals
from testkit.oracle_play import Script, play_many
from testkit.oracle_rig import running_rig
from testkit.oracle_talk import plan

KINDS = ("dense", "hybrid", "sliding")
LENGTH = 10
SCRIPT = Script(ForgettingPlayer, plan, ForgetTotals)


def play(kind: str, folder: Path, seeds: list[str]) -> ForgetTotals:
    """Play sequences on slots that are short, so that they are joined and cut."""
    before = lasting_secret._secret
    asked = disk_settings(folder / "kv", folder, KV_DISK_RUN_TOKENS="64")
    del asked["MODEL_PATH"]
    try:
        with running_rig(folder, kind, **asked) as rig:
            totals, report = play_many(rig, seeds, LENGTH, script=SCRIPT)
    finally:
        lasting_secret.use_secret(before)
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
    seed = os.environ.get("ORACLE_SEED", "1")
    wanted = int(os.environ.get("ORACLE_REQUESTS", "2000")) // len(KINDS) + 1
    total, number = ForgetTotals(), 0
    while total.requests < wanted:
        seeds = [f"{seed}/{kind}/{number + i}" for i in range(20)]
        total.add(play(kind, tmp_path / str(number), seeds))
        number += 20
    print(f"\n{kind}: {total}")
    assert total.mismatches == 0
