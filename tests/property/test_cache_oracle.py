"""
Reuse never lies: any sequence of requests, against a model without a cache.

    pytest -m slow -n 0 -s tests/property/test_cache_oracle.py

plays at least 10,000 requests; ORACLE_SEED and ORACLE_REQUESTS choose others, and with
ORACLE_STATE=FILE a run that was stopped goes on where it was.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.oracle import Player, Totals, play_many
from tests.support.oracle_rig import Rig, running_rig
from tests.support.oracle_talk import OPS, plan

MakeRig = Callable[[str], Rig]
# Sequences of a CI run by kind: 300. Hybrid prompts are slow without a GPU.
SEQUENCES = {"dense": 125, "sliding": 110, "hybrid": 65}
LENGTH = 4
_SLOW_LENGTH = 8
_SAVE_EVERY_S = 10.0


@pytest.fixture(scope="module")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRig]:
    """One server per kind, for all tests of this file."""
    rigs: dict[str, Rig] = {}
    folder = tmp_path_factory.mktemp("oracle")
    with ExitStack() as stack:

        def make(kind: str) -> Rig:
            if kind not in rigs:
                rigs[kind] = stack.enter_context(running_rig(folder, kind))
            return rigs[kind]

        yield make


@pytest.mark.parametrize("kind", SEQUENCES)
def test_no_sequence_of_requests_shows_a_difference(
    kind: str, make_rig: MakeRig
) -> None:
    """Invariants I to III after each request; every kind of op is among them."""
    rig = make_rig(kind)
    seeds = [f"ci/{kind}/{number}" for number in range(SEQUENCES[kind])]
    assert {op.name for seed in seeds for op in plan(seed, LENGTH)} == set(OPS)
    totals, report = play_many(rig, seeds, LENGTH)
    print(f"\n{kind}: {totals}")
    assert report == []
    assert totals.sequences == SEQUENCES[kind]
    assert totals.mismatches == 0
    # The run is worth something: all that is to be checked did happen.
    assert totals.cached_tokens > totals.prompt_tokens / 3
    for number in ("pinned", "restated", "spliced", "cancelled", "failed"):
        assert getattr(totals, number) > 0, number


def test_a_sequence_is_its_seed(make_rig: MakeRig) -> None:
    """The same seed gives the same prompts, whatever was played before."""
    rig = make_rig("dense")
    runs = []
    for _ in range(2):
        player = Player(rig)
        ops = [op for op in plan("same", 14) if op.name not in ("pair", "crash")]
        assert player.play(ops) == []
        runs.append((player.totals, sorted(player._prefixes)))
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_ten_thousand_requests_show_no_difference(make_rig: MakeRig) -> None:
    seed = os.environ.get("ORACLE_SEED", "1")
    wanted = int(os.environ.get("ORACLE_REQUESTS", "10000"))
    state = _State(os.environ.get("ORACLE_STATE"), seed)
    kinds = list(SEQUENCES)
    saved = time.monotonic()
    while state.requests < wanted:
        kind = min(kinds, key=lambda k: state.totals[k].requests)
        number = state.totals[kind].sequences
        name = f"{seed}/{kind}/{number}"
        totals, report = play_many(make_rig(kind), [name], _SLOW_LENGTH)
        assert report == []
        state.totals[kind].add(totals)
        if time.monotonic() - saved > _SAVE_EVERY_S:
            saved = time.monotonic()
            state.save()
            print(f"{state.requests} of {wanted} requests", flush=True)
    state.save()
    for kind in kinds:
        print(f"{kind}: {state.totals[kind]}")
        assert state.totals[kind].mismatches == 0


class _State:
    """Where a long run is, in a file."""

    def __init__(self, file: str | None, seed: str) -> None:
        self._file = Path(file) if file else None
        self._seed = seed
        self.totals = {kind: Totals() for kind in SEQUENCES}
        if self._file and self._file.exists():
            saved = json.loads(self._file.read_text())
            assert saved["seed"] == seed, "the state file is of another seed"
            for kind, numbers in saved["totals"].items():
                self.totals[kind] = Totals(**numbers)

    @property
    def requests(self) -> int:
        """All so far."""
        return sum(totals.requests for totals in self.totals.values())

    def save(self) -> None:
        """Write it down, whole or not at all."""
        if self._file is None:
            return
        totals = {kind: asdict(numbers) for kind, numbers in self.totals.items()}
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"seed": self._seed, "totals": totals}))
        part.replace(self._file)
