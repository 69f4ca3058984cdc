"""What the benchmarks' flags take."""

import argparse

from sidecar.cli.server import at_least

positive = at_least(1)
several = at_least(2)


def counts(text: str) -> list[int]:
    """`1,4,8` as whole numbers, each 1 or more."""
    return [positive(part) for part in text.split(",")]


def above_zero(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number
