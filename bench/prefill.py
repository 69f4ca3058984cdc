"""
How fast prompts are read, against plain mlx-lm and against what the device multiplies.

    python -m bench prefill [--model FOLDER] [--tokens 2048,8192,32768] [--rounds 3]

New prompts and one token of an answer, over HTTP and by `mlx_lm.stream_generate` in a
process of its own, in turns: tokens a second until the first text, medians. The last
column is the share of the rate at which the device multiplies large matrices that the
model's own multiplications and its attention take, ours.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.clients import ask_all
from bench.options import counts
from bench.plain import PlainProcess
from bench.prompts import random_ids
from bench.servers import Setup, make_if_absent, plain_process, sidecar
from sidecar.cli.server import at_least


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m bench prefill", description=__doc__
    )
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--rounds", type=at_least(0), default=3)
    parser.add_argument("--tokens", type=counts, default="2048,8192,32768")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or Path(scratch) / "model").resolve()
        tree = Path(__file__).parents[1]
        setup = Setup(model, None, tree, Path(scratch))
        make_if_absent(setup)
        config = json.loads((model / "config.json").read_text())
        with sidecar(setup) as port, plain_process(setup) as plain:
            most = plain.multiplied(config["torch_dtype"])
            sys.stdout.write(f"large matrices: {most / 1e12:.3g} TFLOP/s\n")
            sys.stdout.write(_row("tokens", "ours", "theirs", "ratio", "of device"))
            for count in options.tokens:
                pairs = _pairs(port, plain, count, options.rounds)
                sys.stdout.write(_figures(count, pairs, _flops(config, count) / most))
                sys.stdout.flush()
    return 0


def _pairs(
    port: int, plain: PlainProcess, count: int, rounds: int
) -> list[tuple[float, float]]:
    """Seconds until the first text, ours and theirs; the first round compiles."""
    pairs = []
    for number in range(rounds + 1):
        prompt = random_ids(count)
        ours = ask_all(port, "/v1/completions", [{"prompt": prompt}], 1)[0].ttft_s
        theirs = plain.complete(prompt, 1).ttft_s
        if number or not rounds:
            pairs.append((ours, theirs))
    return pairs


def _flops(config: Mapping[str, int], count: int) -> float:
    """Operations of the layers' multiplications and of causal attention."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    projections = hidden * head * (2 * heads + 2 * kv_heads)
    layer = projections + 3 * hidden * config["intermediate_size"]
    attention = heads * head * count  # half of twice the square: only what came before
    return 2.0 * config["num_hidden_layers"] * count * (layer + attention)


def _figures(
    count: int, pairs: list[tuple[float, float]], least_s: float
) -> str:  # fmt: skip
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return _row(str(count), f"{count / ours:.0f}", f"{count / theirs:.0f}",
                f"{ratio:.3f}", f"{least_s / ours:.3f}")  # fmt: skip


def _row(*cells: str) -> str:
    return "".join(f"{cell:>11}" for cell in cells) + "\n"
