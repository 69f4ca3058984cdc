"""
What a newcomer costs those who are already being answered.

    python -m bench fairness [--runs 3] [--json FILE]

Arrival: a long prompt comes while four streams decode, on a random model of 7 million
parameters; the same against mlx_lm.server, in turn with ours. Visit: a short request
joins a stream at 32k tokens, on a tiny model. Medians of the runs. Exit code 1 if a bar
failed.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.blas import build_shim
from bench.clients import Answer, complete
from bench.facts import facts
from bench.models import is_made
from bench.prompts import PromptSource
from bench.servers import Setup, mlx_lm_server, run_python, sidecar
from testkit.tiny_models import make_model

_REPOSITORY = Path(__file__).parents[1]
_STREAMS = 4
_STALL_S = 0.5  # DECODE_STALL_TARGET_MS, the default
_FEW = 4
_BEFORE_S = 1.5  # in which the streams' own rate is counted
Seen = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for the median of a metric of ours."""

    metric: str
    unit: str
    limit: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is on the right side."""
        return value >= self.limit if self.at_least else value <= self.limit


_ARRIVAL = (
    Bar("p99 pause beside the prefill", "ms", 1.5 * _STALL_S * 1000),
    Bar("slowest stream keeps", "of its rate", 0.25, at_least=True),
    Bar("newcomer's TTFT", "x solo", 1.6),
)
_VISIT = (
    Bar("long stream keeps", "of its rate", 0.45, at_least=True),
    Bar("longest pause", "ms", _STALL_S * 1000),
)


class Work:
    """Prompts that share no beginning."""

    def __init__(self, model: Path, seed: int) -> None:
        self._source = PromptSource(model / "tokenizer.json", seed)

    def prompt(self, length: int) -> str:
        """One prompt of that many tokens."""
        return self._source.batch(1, length)[0]


def arrival(port: int, work: Work, long_tokens: int) -> dict[str, float]:
    """A long prompt alone, four streams alone, then both."""
    solo = complete(port, [work.prompt(long_tokens)], _FEW)[0]
    alone = complete(port, [work.prompt(64) for _ in range(_STREAMS)], 64)
    step_s = statistics.median(1 / answer.decode_tps for answer in alone)
    # Enough to outlast the newcomer's prefill even at their whole rate.
    num_tokens = 64 + int(2.5 * solo.ttft_s / step_s)
    streams, late = _beside(port, work, num_tokens, work.prompt(long_tokens))
    inside = [_within(answer, late.started, late.first) for answer in streams]
    if min(map(len, inside)) < 2 or any(a.last < late.first for a in streams):
        raise RuntimeError("the streams did not outlast the newcomer's prefill")
    gaps = [b - a for times in inside for a, b in zip(times, times[1:], strict=False)]
    seconds = late.first - late.started
    before = [_within(a, late.started - _BEFORE_S, late.started) for a in streams]
    kept = [
        len(times) / seconds / (len(earlier) / _BEFORE_S)
        for times, earlier in zip(inside, before, strict=True)
    ]
    return {
        "p99 pause beside the prefill": _p99(gaps) * 1000,
        "slowest stream keeps": min(kept),
        "newcomer's TTFT": late.ttft_s / solo.ttft_s,
    }


def visit(port: int, work: Work, long_tokens: int) -> dict[str, float]:
    """A short request beside a stream at a great depth."""
    with ThreadPoolExecutor(1) as other:
        prompt = work.prompt(long_tokens)
        complete(port, [prompt], 1)  # from now on it is warm, and begins at once
        running = other.submit(complete, port, [prompt], 1500)
        time.sleep(1.5)
        short = complete(port, [work.prompt(100)], 150)[0]
        long = running.result()[0]
    inside = _within(long, short.first, short.last)
    before = [t for t in long.times if t < short.started]
    after = [t for t in long.times if t > short.last]
    rates = [_rate(times) for times in (before, after) if len(times) > 20]
    if not rates or len(inside) < 2:
        raise RuntimeError("the long stream did not outlast the visit")
    around = _within(long, short.started, short.last)
    gaps = [b - a for a, b in zip(around, around[1:], strict=False)]
    return {
        "long stream keeps": _rate(inside) / statistics.mean(rates),
        "longest pause": max(gaps) * 1000,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print, judge."""
    options = _parser().parse_args(argv)
    about = facts()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    is_good = True
    ours: Seen = {}
    theirs: Seen = {}
    if "visit" in options.only:
        with contextlib.ExitStack() as running:
            ours = _visits(options, running)
        is_good = _table("a short request beside 32k tokens", _VISIT, ours, {})
    if "arrival" in options.only:
        with contextlib.ExitStack() as running:
            arrived, theirs = _arrivals(options, running)
        title = "a long prompt arrives beside 4 streams"
        is_good &= _table(title, _ARRIVAL, arrived, theirs)
        ours = {**ours, **arrived}
    if options.json:
        found = {"ours": ours, "mlx_lm.server": theirs}
        options.json.write_text(json.dumps({**about, **found}, indent=1))
    print("all bars passed" if is_good else "A BAR FAILED")
    return 0 if is_good else 1


def _arrivals(
    options: argparse.Namespace, running: contextlib.ExitStack
) -> tuple[Seen, Seen]:
    setup = _setup(options, running)
    if not is_made(setup.model):
        run_python(setup, ["-m", "bench.models", str(setup.model), "--small"])
    work = Work(setup.model, options.seed)
    ports = [running.enter_context(sidecar(setup))]
    ports.append(running.enter_context(mlx_lm_server(setup)))
    seen: list[Seen] = [defaultdict(list), defaultdict(list)]
    for port in ports:
        complete(port, [work.prompt(64)], _FEW)
    for number in range(options.runs):
        for port, found in zip(ports, seen, strict=True):
            _note(found, arrival(port, work, options.long_tokens))
        _progress("arrival", number + 1, options.runs, seen)
    return seen[0], seen[1]


def _visits(options: argparse.Namespace, running: contextlib.ExitStack) -> Seen:
    setup = _setup(options, running)
    model = make_model(options.work_dir / "tiny-dense-4", "dense", layers=4)
    setup = Setup(model, setup.shim, setup.tree, setup.scratch)
    work = Work(model, options.seed + 1)
    port = running.enter_context(sidecar(setup))
    seen: Seen = defaultdict(list)
    for number in range(options.runs):
        _note(seen, visit(port, work, options.visited_tokens))
        _progress("visit", number + 1, options.runs, [seen])
    return seen


def _note(seen: Seen, measured: dict[str, float]) -> None:
    for metric, value in measured.items():
        seen[metric].append(value)


def _progress(what: str, number: int, runs: int, seen: list[Seen]) -> None:
    """The last of each, all servers beside each other."""
    last = [
        f"{metric} " + " | ".join(f"{side[metric][-1]:.2f}" for side in seen)
        for metric in seen[0]
    ]
    print(f"{what} {number} of {runs}: " + "; ".join(last), flush=True)


def _beside(
    port: int, work: Work, num_tokens: int, prompt: str
) -> tuple[list[Answer], Answer]:
    prompts = [work.prompt(64) for _ in range(_STREAMS)]
    with ThreadPoolExecutor(1) as other:
        streams = other.submit(complete, port, prompts, num_tokens)
        time.sleep(2.0 + _BEFORE_S)  # all four decode
        late = complete(port, [prompt], _FEW)[0]
        return streams.result(), late


def _within(answer: Answer, start: float, end: float) -> list[float]:
    return [t for t in answer.times if start <= t <= end]


def _rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _table(title: str, bars: tuple[Bar, ...], ours: Seen, theirs: Seen) -> bool:
    print(f"\n{title:<44}{'ours':>10}{'bar':>12}{'mlx_lm.server':>16}")
    is_good = True
    for bar in bars:
        value = statistics.median(ours[bar.metric])
        sign = ">=" if bar.at_least else "<="
        peer = f"{statistics.median(theirs[bar.metric]):.2f}" if theirs else "-"
        verdict = "" if bar.holds(value) else "  FAIL"
        is_good &= bar.holds(value)
        print(f"{bar.metric + ', ' + bar.unit:<44}{value:>10.2f}"
              f"{sign + f' {bar.limit:g}':>12}{peer:>16}{verdict}")  # fmt: skip
    return is_good


def _setup(options: argparse.Namespace, running: contextlib.ExitStack) -> Setup:
    options.work_dir.mkdir(parents=True, exist_ok=True)
    scratch = running.enter_context(tempfile.TemporaryDirectory(prefix="fairness-"))
    shim = build_shim(options.work_dir)
    return Setup(options.work_dir / "small-1", shim, _REPOSITORY, Path(scratch))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench fairness", description=__doc__.split("\n\n")[0].strip()
    )
    default_dir = Path(tempfile.gettempdir()) / "litellm-mlx-bench"
    add = parser.add_argument
    add("--runs", type=int, default=3, help="of each kind (3)")
    add("--only", default="visit,arrival", help="one of them (both)")
    add("--long-tokens", type=int, default=8192, help="the arriving prompt (8192)")
    add("--visited-tokens", type=int, default=32768, help="the stream's depth (32768)")
    add("--seed", type=int, default=0, help="of the prompts (0)")
    add("--work-dir", type=Path, default=default_dir, help=f"kept ({default_dir})")
    add("--json", type=Path, help="also write everything to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
