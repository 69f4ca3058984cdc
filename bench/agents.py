"""
How much of real agents' prompts is prefilled, beside the least that it could be.

    python -m bench.agents [TRACE ...] [--peer] [--json FILE]

Replays recorded traffic against the sidecar with default settings: Chat straight, the
Messages API through the LiteLLM proxy and its plugin. Decoding is scripted: the server
generates the recorded answers, token by token, in the model's raw format; all else is
as in production. The model is one random layer, since only tokens are counted. The
oracle knows what the model read and said, and takes the longest beginning of each
prompt that any earlier sequence had. With --peer, mlx_lm.server gets the same Chat
bodies. Exit code 1 if a bar failed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import savings
from bench.savings import Saving, saving_of
from bench.servers import Setup
from bench.traffic import ask_peer, serve_all
from tests.support.reuse import COUNTED, Served
from tests.support.tiny_models import make_model

_REPOSITORY = Path(__file__).parents[1]


def main(argv: list[str] | None = None) -> int:
    """Replay, print, judge."""
    options = _options(argv)
    results: list[tuple[Saving, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="agents-") as scratch:
        setup = Setup(
            make_model(Path(scratch, "model"), "dense", layers=1, hidden=32),
            None,
            _REPOSITORY,
            Path(scratch),
        )
        for name, served in serve_all(options.traces, setup.model, setup.scratch):
            theirs = ask_peer(served, setup) if options.peer else None
            _print_requests(name, served, theirs)
            saving = saving_of(name, served, theirs)
            results.append((saving, savings.as_json(saving, served)))
    results.sort(key=lambda result: options.traces.index(result[0].name))
    _print_tables([saving for saving, _ in results], with_peer=options.peer)
    if options.json:
        options.json.write_text(json.dumps([r for _, r in results], indent=1) + "\n")
    return 0 if all(saving.passed for saving, _ in results) else 1


def _print_requests(
    name: str, served: Sequence[Served], theirs: Sequence[int] | None
) -> None:
    print(f"\n{name}\n{'request':>8}{'prompt':>8}{'cached':>8}{'prefilled':>11}"
          f"{'oracle':>8}{'  mlx_lm.server' if theirs else ''}")  # fmt: skip
    for number, turn in enumerate(served):
        print(f"{turn.seq:>8}{turn.prompt_len:>8}{turn.cached_len:>8}"
              f"{turn.prefilled_len:>11}{turn.prompt_len - turn.oracle_len:>8}"
              f"{f'{theirs[number]:>15}' if theirs else ''}", flush=True)  # fmt: skip


def _print_tables(found: Sequence[Saving], *, with_peer: bool) -> None:
    print("\nTokens, summed from each client's second request on:\n")
    print(savings.prefill_table(found))
    print("\nBars; append-only: third and later requests of such a thread:\n")
    print(savings.bar_table(found))
    if with_peer:
        print("\nThe same requests to mlx_lm.server, whose own answers are random:\n")
        print(savings.peer_table(found))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.agents", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "traces", nargs="*", metavar="TRACE", help=f"any of {', '.join(COUNTED)} (all)"
    )
    parser.add_argument("--peer", action="store_true", help="ask mlx_lm.server too")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args(argv)
    options.traces = options.traces or list(COUNTED)
    if unknown := set(options.traces) - COUNTED.keys():
        parser.error(f"no such trace: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
