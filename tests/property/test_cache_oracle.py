"""
Reuse never lies: any sequence of requests, against a model without a cache.

    pytest -m slow -n 0 -s tests/property/test_cache_oracle.py

plays at least 10,000 requests, on models of each kind with the tokenizer and template
of each family; ORACLE_SEED and ORACLE_REQUESTS choose others, and with
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

from testkit.oracle import Player, Totals
from testkit.oracle_play import play_many
from testkit.oracle_rig import Rig, running_rig
from testkit.oracle_talk import OPS, plan
from testkit.real_templates import FAMILIES

MakeRig = Callable[[str], Rig]
# Sequences of a CI run by kind: 300 with those of the families. Hybrid prompts are slow
# without a GPU.
SEQUENCES = {"dense": 120, "sliding": 100, "hybrid": 50}
LENGTH = 4
# Templates of as many ways to trim, escape, move and hide what they are given.
FAMILY_KINDS = {
    "qwen3.5": "hybrid", "qwen3": "dense", "llama3.2": "dense", "gpt-oss": "sliding",
    "mistral-nemo": "sliding", "ministral-3": "dense", "deepseek-v3.1": "dense",
    "gemma4": "sliding", "glm4.5": "dense", "kimi-k2": "dense",
}  # fmt: skip
_FAMILY_SEQUENCES = 3
_SLOW_LENGTH = 8
_BUILTIN = "builtin"
# The built-in model's template gets as much as four families.
_PAIRS = [(kind, family.name) for family in FAMILIES for kind in SEQUENCES] + [
    (kind, _BUILTIN) for kind in SEQUENCES for _ in range(4)
]
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


@pytest.mark.parametrize("family", FAMILY_KINDS)
def test_no_template_makes_a_difference(family: str, tmp_path: Path) -> None:
    """The same invariants, with the tokenizer and template of a model family."""
    kind = FAMILY_KINDS[family]
    seeds = [f"ci/{family}/{number}" for number in range(_FAMILY_SEQUENCES)]
    with running_rig(tmp_path, kind, family) as rig:
        totals, report = play_many(rig, seeds, LENGTH)
    print(f"\n{kind} {family}: {totals}")
    assert report == []
    assert totals.cached_tokens > totals.prompt_tokens / 4
    assert totals.spliced > 0


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
def test_ten_thousand_requests_show_no_difference(tmp_path: Path) -> None:
    """The pairs of kind and family take turns, each on a server of its own."""
    seed = os.environ.get("ORACLE_SEED", "1")
    wanted = int(os.environ.get("ORACLE_REQUESTS", "10000"))
    state = _State(os.environ.get("ORACLE_STATE"), seed)
    for number, (kind, family) in enumerate(_PAIRS, 1):
        share = wanted * number // len(_PAIRS)
        if state.requests >= share:
            continue
        with running_rig(tmp_path, kind, "" if family == _BUILTIN else family) as rig:
            _play(rig, state, f"{kind}/{family}", share)
        print(f"{state.requests} of {wanted} requests, {kind}/{family}", flush=True)
    for name, totals in sorted(state.by_kind_and_family().items()):
        print(f"{name}: {totals}")
    assert state.requests >= wanted
    assert all(totals.mismatches == 0 for totals in state.totals.values())


def _play(rig: Rig, state: "_State", pair: str, share: int) -> None:
    """Sequences of a pair until all pairs so far have their share of the requests."""
    totals = state.totals.setdefault(pair, Totals())
    saved = time.monotonic()
    while state.requests < share:
        name = f"{state.seed}/{pair}/{totals.sequences}"
        played, report = play_many(rig, [name], _SLOW_LENGTH)
        assert not report, "\n".join(report)
        totals.add(played)
        if time.monotonic() - saved > _SAVE_EVERY_S:
            saved = time.monotonic()
            state.save()
    state.save()


class _State:
    """Where a long run is, in a file; totals by kind and family."""

    def __init__(self, file: str | None, seed: str) -> None:
        self.seed = seed
        self.totals: dict[str, Totals] = {}
        self._file = Path(file) if file else None
        if self._file and self._file.exists():
            saved = json.loads(self._file.read_text())
            assert saved["seed"] == seed, "the state file is of another seed"
            for pair, numbers in saved["totals"].items():
                self.totals[pair] = Totals(**numbers)

    @property
    def requests(self) -> int:
        """All so far."""
        return sum(totals.requests for totals in self.totals.values())

    def by_kind_and_family(self) -> dict[str, Totals]:
        """The totals of each kind, and of each family."""
        sums: dict[str, Totals] = {}
        for pair, totals in self.totals.items():
            for name in ("all", *pair.split("/")):
                sums.setdefault(name, Totals()).add(totals)
        return sums

    def save(self) -> None:
        """Write it down, whole or not at all."""
        if self._file is None:
            return
        totals = {pair: asdict(numbers) for pair, numbers in self.totals.items()}
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"seed": self.seed, "totals": totals}))
        part.replace(self._file)
