"""
What a stream over HTTP takes a step, against mlx-lm's batch without a server.

    python -m bench streams [--model FOLDER] [--streams 1,4,8,16,32] [--rounds 3]

Ours and mlx-lm's BatchGenerator, each in a process of its own, decode as many rows of
new prompts in turns. Of each round the steps count in which all rows decode: medians,
means and the 99th percentile; the speeds are theirs over ours. `--twice` has mlx-lm's
process a second time, and its speed as if it were ours: what the machine alone does.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clients import ask_all
from bench.options import counts, positive, several
from bench.prompts import random_ids
from bench.servers import Setup, make_if_absent, raw_batch, sidecar


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of the steps of one round."""

    median: float
    mean: float
    p99: float
    longest: float


Pair = tuple[Steps, Steps]  # of one, and of what it is held against


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m bench streams", description=__doc__
    )
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--streams", type=counts, default="1,4,8,16,32")
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of each")
    parser.add_argument("--max-tokens", type=several, default=300)
    parser.add_argument("--twice", action="store_true", help="mlx-lm's process again")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(__file__).parents[1]
        most = str(max(options.streams))
        settings = {"BATCH_MAX_SIZE": most, "MAX_CONCURRENT_REQUESTS": most,
                    "SPECULATION": "off"}  # fmt: skip
        model = options.model or Path(scratch) / "model"
        setup = Setup(model.resolve(), None, tree, Path(scratch), settings=settings)
        make_if_absent(setup)
        with contextlib.ExitStack() as running:
            port = running.enter_context(sidecar(setup))
            raw = running.enter_context(raw_batch(setup))
            again = running.enter_context(raw_batch(setup)) if options.twice else None
            sys.stdout.write(_row("streams", "ours", "theirs", "speed", "mean",
                                  "p99", "theirs", "longest", "theirs"))  # fmt: skip
            for count in options.streams:
                rounds, same = list[Pair](), list[Pair]()
                for number in range(options.rounds + 1):
                    sizes = (count, options.prompt, options.max_tokens)
                    theirs = _summary([raw.steps(*sizes)])
                    ours = _summary(_ours(port, *sizes))
                    if again is not None:
                        same.append((_summary([again.steps(*sizes)]), theirs))
                    if number:  # the first one compiles
                        rounds.append((ours, theirs))
                sys.stdout.write(_table(str(count), rounds))
                if same:
                    sys.stdout.write(_table("again", same[1:]))
                sys.stdout.flush()
    return 0


def _ours(port: int, count: int, num_prompt: int, num_tokens: int) -> list[list[float]]:
    """Of each stream, the seconds between its tokens."""
    bodies = [{"prompt": random_ids(num_prompt)} for _ in range(count)]
    answers = ask_all(port, "/v1/completions", bodies, num_tokens)
    begun = max(answer.first for answer in answers)
    ended = min(answer.last for answer in answers)
    return [_gaps(answer.times, begun, ended) for answer in answers]


def _gaps(times: Sequence[float], begun: float, ended: float) -> list[float]:
    """Between tokens, while all streams have begun and none has ended."""
    inside = [at for at in times if begun <= at <= ended]
    return [after - before for before, after in itertools.pairwise(inside)]


def _summary(streams: Sequence[Sequence[float]]) -> Steps:
    every = sorted(gap for stream in streams for gap in stream)
    if len(every) < 20:
        raise SystemExit("too few steps in which all streams decode: more --max-tokens")
    return Steps(
        statistics.median(every),
        statistics.mean(every),
        every[int(len(every) * 0.99)],
        every[-1],
    )


def _table(name: str, rounds: Sequence[Pair]) -> str:
    def median(field: str, side: int) -> str:
        values = [getattr(pair[side], field) for pair in rounds]
        return f"{1000 * statistics.median(values):.1f}"

    def speed(field: str) -> str:
        ratios = [getattr(b, field) / getattr(a, field) for a, b in rounds]
        return f"{statistics.median(ratios):.3f}"

    return _row(
        name, median("median", 0), median("median", 1), speed("median"),
        speed("mean"), median("p99", 0), median("p99", 1),
        median("longest", 0), median("longest", 1),
    )  # fmt: skip


def _row(*cells: str) -> str:
    return "".join(f"{cell:>9}" for cell in cells) + "\n"
