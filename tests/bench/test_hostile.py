"""The hostile bench, for some seconds: what is right and what stays, not how fast."""

import random
from pathlib import Path

import pytest

from bench.good_agents import Heard
from bench.hostile import Plan, run
from bench.hostile_inputs import KINDS, Target
from bench.hostile_report import Result, judge, table
from bench.server_pair import Figures, Outage

_SERVERS = {"litellm": Figures(9, 9, 9 << 20), "sidecar": Figures(9, 9, 9 << 20)}


@pytest.mark.timeout(1200)
def test_no_answer_is_wrong_and_nothing_stays(tmp_path: Path) -> None:
    """The launcher's pair, two kills, hostile clients of all kinds on both ports."""
    plan = Plan(4, 18, num_talks=1, num_turns=3, seed=1, kind="hybrid")
    result = run(plan, tmp_path)
    failed = judge(result, with_times=False)
    wrong = [
        line for line in failed if line.startswith(("wrong", "litellm", "sidecar"))
    ]
    assert wrong == [], table(result)
    assert any(heard.text for heard in result.alone)
    assert any(heard.text for heard in result.crowded)
    assert any(heard.text for heard in result.beside)
    assert len(result.outages) == 2
    assert sum(map(len, result.attacks.values())) > 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_attack_can_be_made_whatever_is_drawn(kind: object) -> None:
    """And shown; the same from the same chance."""
    target = Target(4000, "local")
    one, two = (
        [kind(target, random.Random(seed)) for seed in range(20)]  # type: ignore[operator]
        for _ in range(2)
    )
    assert one == two
    assert all(attack.pieces or attack.way == "crowd" for attack in one)
    assert all(len(attack.shown()) < 10_000 for attack in one)


def heard(started: float, wait_s: float, problem: str = "") -> Heard:
    first = started + wait_s
    return Heard(None if problem else "x", started, first, first, problem)


def result_of(beside: list[Heard], **changed: object) -> Result:
    same = {
        "alone": [heard(0, 1.0)], "crowded": [], "beside": beside, "wrong": [],
        "outages": [Outage(100, 110)], "base": _SERVERS, "after": [_SERVERS],
        "maximum": _SERVERS, "attacks": {"x": {"200": 1}}, "slowest": {},
        "findings": [],
    }  # fmt: skip
    return Result(**{**same, **changed})  # type: ignore[arg-type]


def test_each_bar_is_judged() -> None:
    good = result_of([heard(50, 2.9), heard(111, 2.0)])
    assert judge(good, with_times=True) == []
    slow = result_of([heard(50, 3.1), heard(111, 2.0)])
    assert judge(slow, with_times=False) == []
    assert "p99" in judge(slow, with_times=True)[0]
    (failed,) = judge(result_of([heard(50, 1, "503")]), with_times=False)
    assert failed == "good client failed: 503"
    assert judge(result_of([], wrong=["a, not b"]), with_times=False)
    for more in (Figures(10, 9, 1), Figures(9, 10, 1), Figures(9, 9, 90 << 20)):
        left = result_of([], after=[{**_SERVERS, "sidecar": more}])
        assert "not back" in judge(left, with_times=False)[0]
    minimum = [{**_SERVERS, "sidecar": Figures(10, 9, 1)}, _SERVERS]
    assert judge(result_of([], after=minimum), with_times=False) == []


def test_what_a_kill_explains_is_counted_apart() -> None:
    """Until the first answer to what was asked behind it."""
    late = [heard(99, 20, "500"), heard(105, 1, "503"), heard(112, 8)]
    finding = {
        "kind": "x", "port": 1, "outcome": "500", "sent": "", "answer": "",
        "started": 119.0, "ended": 120.0,
    }  # fmt: skip
    after = {**finding, "started": 121.0, "ended": 122.0}
    result = result_of([*late, heard(125, 1)], findings=[finding])
    assert judge(result, with_times=True) == []
    assert "failed in an outage: 2; else: 0" in table(result)
    assert "a request served after 20.0 s" in table(result)
    (failed,) = judge(result_of(late, findings=[after]), with_times=False)
    assert failed.startswith("x got 500")
