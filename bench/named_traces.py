"""The names of recorded traces on a command line."""

import argparse

from testkit.counted import COUNTED


def parse_traces(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> argparse.Namespace:
    """Parse options whose `traces` are names of recorded ones; none means all."""
    options = parser.parse_args(argv)
    options.traces = options.traces or list(COUNTED)
    if unknown := set(options.traces) - COUNTED.keys():
        parser.error(f"no such trace: {', '.join(sorted(unknown))}")
    return options
