"""
Good clients beside hostile ones: who waits how long, what stays, what is wrong.

    python -m bench hostile [--minutes 10] [--json FILE]

The launcher as users run it, LiteLLM and sidecar, with a random model of two layers.
Good clients hold conversations on the three routes, first alone, then beside eight
ordinary ones (what the number alone costs), then beside eight hostile ones
(`bench/hostile_inputs.py`); meanwhile the sidecar is killed twice. Then all is quiet,
and both servers must be back at what they took before: files, threads, memory. A wait
lasts from the send to the first text. Exit code 1 if a bar failed.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.facts import facts
from bench.good_agents import Agent, Diary, Talk, learn, make_texts
from bench.hostile_inputs import ROUTES
from bench.hostile_report import POOL_THREADS, Result, judge, table
from bench.server_pair import Figures, ServerPair, running_pair
from testkit.tiny_models import make_model

_REPOSITORY = Path(__file__).parents[1]
_REQUEST_S = 120.0
_QUIET_S = 120.0  # for what was left to end: slow heads have half a minute
_MEASURES = 3
_IDLE_S = 30.0  # an idle server gives back what it has freed after 20 s
_MEASURE_GAP_S = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """
    How long and how much.

    Args:
        beside_s: of hostile traffic; a third before, between and behind the kills.
        num_talks: conversations of each good client, each of so many turns.
    """

    alone_s: float
    beside_s: float
    num_talks: int
    num_turns: int
    seed: int
    kind: str


@dataclass
class _Run:
    """What is there while it runs."""

    plan: Plan
    pair: ServerPair
    http: httpx.Client
    model: str
    talks: dict[str, list[Talk]] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    """Run, print, judge."""
    options = _parser().parse_args(argv)
    seconds = options.minutes * 60
    plan = Plan(
        options.alone or seconds / 5, seconds, options.talks, options.turns,
        options.seed, options.kind,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        result = run(plan, Path(scratch))
    for name, value in facts().items():
        print(f"{name}: {value}")
    print(f"\n{table(result)}\n")
    failed = judge(result, with_times=True)
    print("\n".join(failed) or "all bars passed")
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return 1 if failed else 0


def run(plan: Plan, scratch: Path) -> Result:
    """All phases; takes a little longer than the plan's seconds."""
    model = make_model(scratch / "tiny", plan.kind)
    with (
        running_pair(scratch, model) as pair,
        httpx.Client(base_url=pair.url, timeout=_REQUEST_S, trust_env=False) as http,
    ):
        running = _Run(plan, pair, http, "local")
        _learn(running)
        _tell("warm-up")
        _hostile(running, "--times", "2").communicate()
        _tell("quiet")
        base = _settled(pair, None)[-1]
        _tell(f"base: {_shown(base)}; good clients alone")
        alone = _good(running, plan.alone_s)
        _tell("good and ordinary clients")
        crowded = _crowded(running, plan.alone_s)
        _tell("good and hostile clients")
        beside, attacks = _beside(running)
        _tell("quiet")
        after = _settled(pair, base)
    return Result(
        alone.heard, crowded.heard, beside.heard,
        alone.wrong + crowded.wrong + beside.wrong, pair.outages,
        base, after, pair.maximum, attacks["outcomes"], attacks["slowest"],
        attacks["findings"],
    )  # fmt: skip


def _learn(running: _Run) -> None:
    plan = running.plan
    for route in ROUTES:
        running.talks[route] = [
            learn(
                running.http, route, running.model,
                make_texts(f"{plan.seed}{route}", number, plan.num_turns),
                running.pair.forget,
            )
            for number in range(plan.num_talks)
        ]  # fmt: skip
    turns = [t for talks in running.talks.values() for x in talks for t in x.turns]
    differ = sum(turn.warm != turn.cold for turn in turns)
    _tell(f"learnt {len(turns)} turns; the cold answer differs in {differ}")


def _good(running: _Run, seconds: float) -> Diary:
    diary, until = Diary(), time.monotonic() + seconds
    with _agents(running, diary, until):
        pass
    return diary


def _crowded(running: _Run, seconds: float) -> Diary:
    others = _hostile(running, "--ordinary", "--seconds", str(seconds))
    diary = _good(running, seconds)
    others.communicate()
    return diary


@contextlib.contextmanager
def _agents(running: _Run, diary: Diary, until: float) -> Iterator[None]:
    """One on each route; waits for their last answers."""
    threads = []
    for route, talks in running.talks.items():
        agent = Agent(running.http, talks, diary, lambda: running.pair.num_kills)
        chance = random.Random(f"{running.plan.seed}{route}")
        threads.append(threading.Thread(target=agent.run, args=(until, chance)))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _beside(running: _Run) -> tuple[Diary, Any]:
    diary, seconds = Diary(), running.plan.beside_s
    started = time.monotonic()
    hostile = _hostile(running, "--seconds", str(seconds))
    with running.pair.watched(), _agents(running, diary, started + seconds):
        for third in (1, 2):
            time.sleep(max(0.0, started + third * seconds / 3 - time.monotonic()))
            running.pair.kill_sidecar()
            outage = running.pair.outages[-1]
            _tell(f"killed; back after {outage.back_at - outage.killed_at:.1f} s")
    printed, _ = hostile.communicate()
    if hostile.returncode:
        raise ChildProcessError(f"the hostile clients ended with {hostile.returncode}")
    return diary, json.loads(printed)


def _hostile(running: _Run, *arguments: str) -> subprocess.Popen[str]:
    ports = [str(port) for port in running.pair.ports.values()]
    command = [sys.executable, "-m", "bench.hostile_clients", *ports, running.model]
    command += ["--seed", str(running.plan.seed), *arguments]
    return subprocess.Popen(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, text=True)


def _settled(
    pair: ServerPair, base: dict[str, Figures] | None
) -> list[dict[str, Figures]]:
    """
    Measure when files, threads and memory are back at the base, or time is up.

    What is kept for reuse is forgotten first: it has its own budgets, and is no leak.
    """
    deadline = time.monotonic() + _QUIET_S
    pair.forget()
    time.sleep(_IDLE_S)
    measures = [pair.figures()]
    while time.monotonic() < deadline:
        time.sleep(_MEASURE_GAP_S)
        measures.append(pair.figures())
        last = measures[-_MEASURES:]
        if base is None:
            counts = {(f.num_fds, f.num_threads) for m in last for f in m.values()}
            if len(last) == _MEASURES and len(counts) <= len(last[0]):
                break
        elif len(last) == _MEASURES and all(_is_back(m, base) for m in last):
            break
    return measures[-_MEASURES:]


def _is_back(now: dict[str, Figures], base: dict[str, Figures]) -> bool:
    return all(
        now[name].num_fds <= base[name].num_fds
        and now[name].num_threads <= base[name].num_threads + POOL_THREADS[name]
        for name in base
    )


def _shown(figures: dict[str, Figures]) -> str:
    return "; ".join(f"{name} {value}" for name, value in figures.items())


def _tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hostile", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="of hostile traffic (10)")
    add("--alone", type=float, help="seconds of good clients alone (a fifth of it)")
    add("--talks", type=int, default=6, help="conversations of each good client (6)")
    add("--turns", type=int, default=6, help="of a conversation (6)")
    add("--kind", default="hybrid", help="of the model: dense, hybrid, sliding")
    add("--seed", type=int, default=0, help="of texts and attacks (0)")
    add("--json", type=Path, help="also write everything to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
