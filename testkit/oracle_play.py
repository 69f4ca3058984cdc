"""Plays the oracle fuzzer's sequences, and makes what fails small."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.oracle import Player, Totals, Violation
from testkit.oracle_rig import Rig
from testkit.oracle_talk import Op, plan


@dataclass(frozen=True, slots=True)
class Script:
    """
    Who plays on a rig, and what.

    Args:
        plan: the ops of a sequence, from its seed and length. totals: of no sequence.
    """

    player: Callable[[Any], Player]
    plan: Callable[[str, int], list[Op]]
    totals: Callable[[], Totals] = Totals


TEXT = Script(Player, plan)


def shrink(
    rig: Rig, ops: Sequence[Op], script: Script = TEXT, tries: int = 40
) -> list[Op]:
    """A shorter sequence that still violates something, as short as `tries` allow."""
    best = list(ops)
    at = len(best) - 1
    while at >= 0 and tries:
        shorter = best[:at] + best[at + 1 :]
        tries -= 1
        player = script.player(rig)
        if shorter and player.play(shorter):
            best = shorter[: shorter.index(player.found[0].op) + 1]
        at = min(at, len(best)) - 1
    return best


def play_many(
    rig: Rig,
    seeds: Sequence[str],
    length: int,
    on_sequence: Callable[[str, Totals], None] = lambda *_: None,
    script: Script = TEXT,
) -> tuple[Totals, list[str]]:
    """
    Play sequences, each from its seed alone.

    Returns:
        The totals; and for the first violation its report, shrunk.
    """
    totals = script.totals()
    for seed in seeds:
        ops = script.plan(seed, length)
        player = script.player(rig)
        player.play(ops)
        totals.add(player.totals)
        if player.found:
            last = ops.index(player.found[-1].op) + 1
            return totals, [
                f"seed {seed}",
                *_told(rig, ops[:last], player.found, script),
            ]
        on_sequence(seed, totals)
    return totals, []


def play_share(
    play: Callable[[str, Path, list[str]], Totals],
    total: Totals,
    kind: str,
    num_kinds: int,
    folder: Path,
) -> None:
    """
    Add to `total` until it is one kind's share of ORACLE_REQUESTS (2,000).

    Args:
        play: sequences of a kind, on a server in a folder of its own.
    """
    seed, number = os.environ.get("ORACLE_SEED", "1"), 0
    wanted = int(os.environ.get("ORACLE_REQUESTS", "2000")) // num_kinds + 1
    while total.requests < wanted:
        seeds = [f"{seed}/{kind}/{number + i}" for i in range(20)]
        total.add(play(kind, folder / str(number), seeds))
        number += 20


def _told(
    rig: Rig, ops: Sequence[Op], found: Sequence[Violation], script: Script
) -> list[str]:
    shortest = shrink(rig, ops, script)
    return [
        *(f"{v.invariant} after {v.op.name} {v.op.seed}: {v.detail}" for v in found),
        "shrunk to: " + ", ".join(f"{op.name} {op.seed}" for op in shortest),
    ]
