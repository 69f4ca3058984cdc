"""
The longest wait of a stream between two tokens: alone, and while others join it.

    python -m bench gaps [--model FOLDER] [--max-tokens 4000] [--streams 32]

One stream alone; then streams that begin one after another while those before them
decode, each with a new prompt.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.clients import Answer, ask_all
from bench.options import above_zero, positive, several
from bench.prompts import random_ids
from bench.servers import Setup, make_if_absent, sidecar


def main(argv: list[str]) -> int:
    """Exit code 0; the figures go to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench gaps", description=__doc__)
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of each")
    parser.add_argument("--max-tokens", type=several, default=4000)
    parser.add_argument("--streams", type=positive, default=32)
    parser.add_argument("--every", type=above_zero, default=0.3, help="seconds")
    parser.add_argument("--rounds", type=positive, default=2)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or Path(scratch) / "model").resolve()
        most = str(options.streams)
        settings = {"SPECULATION": "off", "BATCH_MAX_SIZE": most,
                    "MAX_CONCURRENT_REQUESTS": most}  # fmt: skip
        tree = Path(__file__).parents[1]
        setup = Setup(model, None, tree, Path(scratch), settings=settings)
        make_if_absent(setup)
        with sidecar(setup) as port:
            for _ in range(options.rounds):
                alone = _stream(port, options.prompt, options.max_tokens)
                sys.stdout.write(_figures("alone", [alone]))
                sys.stdout.write(_figures("joining", _joining(port, options)))
                sys.stdout.flush()
    return 0


def _joining(port: int, options: argparse.Namespace) -> list[Answer]:
    """Streams that all decode at the end, each begun after the one before."""
    count, every = options.streams, options.every
    tokens = min(options.max_tokens, 1000)

    def begin(number: int) -> Answer:
        time.sleep(number * every)
        return _stream(port, options.prompt, tokens)

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(begin, range(count))]


def _stream(port: int, num_prompt: int, max_tokens: int) -> Answer:
    prompt = random_ids(num_prompt)
    return ask_all(port, "/v1/completions", [{"prompt": prompt}], max_tokens)[0]


def _figures(name: str, answers: Sequence[Answer]) -> str:
    gaps = sorted(
        1000 * (after - before)
        for answer in answers
        for before, after in itertools.pairwise(answer.times)
    )
    median, longest = statistics.median(gaps), gaps[-1]
    return (
        f"{name}: {len(answers)} streams, median step {median:.1f} ms, p99 "
        f"{gaps[int(len(gaps) * 0.99)]:.1f}, longest {longest:.1f} "
        f"({longest / median:.1f} times the median)\n"
    )
