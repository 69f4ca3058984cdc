"""
The benchmarks by name: `python -m bench NAME [options]`.

compare: all servers on equal work; agents: recorded traffic; fairness, overhead,
restore, warm_turn, conversation: single figures. `NAME --help` says more.
"""

import importlib
import sys

_NAMES = (
    "compare", "agents", "fairness", "overhead", "restore", "warm_turn", "conversation",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Exit code of the benchmark; 2: no such name."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in _NAMES:
        sys.stderr.write(f"usage: python -m bench {{{','.join(_NAMES)}}} [options]\n")
        return 2
    code: int = importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
