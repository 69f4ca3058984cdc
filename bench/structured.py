"""
What it costs to hold answers to a schema: decode rate with one, over without.

    python -m bench structured [--model FOLDER] [--rounds 5] [--streams 1,8]

Chats with and without `response_format` in turns on one sidecar, temperature 1, as many
tokens each: the schema is a list that goes on for longer. The ratios are of one round;
the table has their medians.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.clients import ask_all
from bench.options import counts, positive, several
from bench.servers import Setup, sidecar

_BUILTIN = Path(__file__).parents[1] / "sidecar" / "builtin_model"
_NOTE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 200},
        "number": {"type": "integer"},
        "kind": {"enum": ["one", "two", "three"]},
    },
    "required": ["title", "number", "kind"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _NOTE, "minItems": 1000}
_FORM = {
    "type": "json_schema",
    "json_schema": {"name": "notes", "schema": _SCHEMA, "strict": True},
}


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m bench structured", description=__doc__
    )
    parser.add_argument("--model", type=Path, default=_BUILTIN)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--streams", type=counts, default="1,8")
    parser.add_argument("--max-tokens", type=several, default=256)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(__file__).parents[1]
        setup = Setup(options.model.resolve(), None, tree, Path(scratch))
        with sidecar(setup) as port:
            sys.stdout.write(f"{'streams':>7}{'free':>9}{'held':>9}{'ratio':>8}\n")
            for count in options.streams:
                _measure(port, count, options)
    return 0


def _measure(port: int, count: int, options: argparse.Namespace) -> None:
    rounds = []
    for number in range(options.rounds + 1):
        order = (False, True) if number % 2 else (True, False)
        rates = {held: _rate(port, count, options.max_tokens, number, held=held)
                 for held in order}  # fmt: skip
        if number:  # the first one compiles
            rounds.append((rates[False], rates[True]))
    free, held = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratio = statistics.median(after / before for before, after in rounds)
    sys.stdout.write(f"{count:>7}{free:>9.1f}{held:>9.1f}{ratio:>8.3f}\n")
    sys.stdout.flush()


def _rate(port: int, count: int, max_tokens: int, seed: int, *, held: bool) -> float:
    """Tokens a second of one stream, the median of all."""
    bodies = [_body(seed * 100 + n, held=held) for n in range(count)]
    answers = ask_all(port, "/v1/chat/completions", bodies, max_tokens)
    return statistics.median(answer.decode_tps for answer in answers)


def _body(seed: int, *, held: bool) -> dict[str, Any]:
    asked = {"response_format": _FORM} if held else {}
    return {
        "messages": [{"role": "user", "content": f"Write notes {seed}."}],
        "temperature": 1,
        "seed": seed,
        "enable_thinking": False,
        **asked,
    }
