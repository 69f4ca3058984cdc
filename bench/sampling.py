"""
What a sampling option costs: decode rate with it, over greedy in the same round.

    python -m bench sampling [--model FOLDER] [--rounds 5] [--streams 1,8]

Each round decodes new prompts greedily, with every option, and greedily again; an
option's ratio is to the mean of both. The table has medians, and greedy against itself.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.clients import ask_all
from bench.options import counts, positive, several
from bench.prompts import random_ids
from bench.servers import Setup, make_if_absent, sidecar

_WARM = {"temperature": 0.8}
_FILTERS = {"top_p": 0.95, "top_k": 40, "min_p": 0.05}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "temperature": _WARM,
    "top_p": {**_WARM, "top_p": 0.95},
    "top_k": {**_WARM, "top_k": 40},
    "min_p": {**_WARM, "min_p": 0.05},
    "all three": {**_WARM, **_FILTERS},
    "seed": {**_WARM, "seed": 7},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"100": 1.0, "200": -1.0}},
    "logprobs": {"logprobs": 5},
}


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m bench sampling", description=__doc__
    )
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--streams", type=counts, default="1,8")
    parser.add_argument("--max-tokens", type=several, default=200)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or Path(scratch) / "model").resolve()
        settings = {"SPECULATION": "off"}
        tree = Path(__file__).parents[1]
        setup = Setup(model, None, tree, Path(scratch), settings=settings)
        make_if_absent(setup)
        with sidecar(setup) as port:
            found = [_ratios(port, count, options) for count in options.streams]
            sys.stdout.write(_row("speed over greedy", map(str, options.streams)))
            for name in found[0]:
                sys.stdout.write(_row(name, (f"{side[name]:.3f}" for side in found)))
    return 0


def _ratios(port: int, count: int, options: argparse.Namespace) -> dict[str, float]:
    names = [*_OPTIONS]
    found: dict[str, list[float]] = {name: [] for name in ("greedy", *names)}
    for number in range(options.rounds + 1):
        random.shuffle(names)
        before = _rate(port, count, options.max_tokens, {})
        rates = {
            name: _rate(port, count, options.max_tokens, _OPTIONS[name])
            for name in names
        }
        after = _rate(port, count, options.max_tokens, {})
        if number:  # the first one compiles
            found["greedy"].append(after / before)
            for name, rate in rates.items():
                found[name].append(2 * rate / (before + after))
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def _rate(port: int, count: int, max_tokens: int, asked: Mapping[str, Any]) -> float:
    """Tokens a second of one stream, the median of all."""
    bodies = [{"prompt": random_ids(200), **asked} for _ in range(count)]
    answers = ask_all(port, "/v1/completions", bodies, max_tokens)
    return statistics.median(answer.decode_tps for answer in answers)


def _row(name: str, cells: Any) -> str:
    return f"{name:<20}" + "".join(f"{cell:>8}" for cell in cells) + "\n"
