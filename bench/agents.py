"""
How much of real agents' prompts is prefilled, beside the least that it could be.

    python -m bench.agents [TRACE ...] [--peer] [--compact] [--required] [--json FILE]

Replays recorded traffic against the sidecar with default settings: Chat straight, the
Messages API through the LiteLLM proxy and its plugin. Decoding is scripted: the server
generates the recorded answers, token by token, in the model's raw format; all else is
as in production. The model is one random layer, since only tokens are counted. The
oracle knows what the model read and said, and takes the longest beginning of each
prompt that any earlier sequence had. With --peer, mlx_lm.server gets the same Chat
bodies; it cannot be scripted, so what it could reuse of its answers is calculated.
Exit code 1 if a bar failed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import savings
from bench.exact import prefilled_exactly
from bench.named_traces import parse_traces
from bench.savings import Saving, saving_of
from bench.servers import Setup
from bench.traffic import ask_peer, serve_all
from testkit.counted import COUNTED
from testkit.reuse import Served, as_rendered, compact, with_required_calls
from testkit.tiny_models import make_model

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
        hand = compact if options.compact else as_rendered
        alter = with_required_calls if options.required else list
        all_served = serve_all(options.traces, setup.model, setup.scratch, hand, alter)
        for name, served in all_served:
            theirs = _ask_peer(served, setup) if options.peer else None
            _print_requests(name, served, theirs)
            saving = saving_of(name, served, theirs)
            results.append((saving, savings.as_json(saving, served)))
    results.sort(key=lambda result: options.traces.index(result[0].name))
    _print_tables([saving for saving, _ in results], with_peer=options.peer)
    if options.json:
        options.json.write_text(json.dumps([r for _, r in results], indent=1) + "\n")
    return 0 if all(saving.passed for saving, _ in results) else 1


def _ask_peer(served: Sequence[Served], setup: Setup) -> tuple[list[int], list[int]]:
    """Prefilled by mlx_lm.server, and what it could with the recorded answers."""
    return ask_peer(served, setup), prefilled_exactly(served, setup.model)


def _print_requests(
    name: str,
    served: Sequence[Served],
    theirs: tuple[Sequence[int], Sequence[int]] | None,
) -> None:
    columns = ["request", "prompt", "cached", "prefilled", "oracle"]
    rows: list[list[int]] = [
        [
            t.seq,
            t.prompt_len,
            t.cached_len,
            t.prefilled_len,
            t.prompt_len - t.oracle_len,
        ]
        for t in served
    ]
    if theirs:
        columns += ["mlx_lm.server", "with answers"]
        peers = zip(*theirs, strict=True)
        rows = [[*row, *both] for row, both in zip(rows, peers, strict=True)]
    print(f"\n{name}")
    lines: list[Sequence[object]] = [columns, *rows]
    for line in lines:
        print("".join(f"{cell:>14}" for cell in line), flush=True)


def _print_tables(found: Sequence[Saving], *, with_peer: bool) -> None:
    print("\nTokens, summed from each client's second request on:\n")
    print(savings.prefill_table(found))
    print("\nBars; append-only: third and later requests of such a thread:\n")
    print(savings.bar_table(found))
    if with_peer:
        print(
            "\nThe same requests to mlx_lm.server, whose own answers are random, and,"
        )
        print("calculated, exact prefixes if it had given the recorded answers:\n")
        print(savings.peer_table(found))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.agents", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "traces", nargs="*", metavar="TRACE", help=f"any of {', '.join(COUNTED)} (all)"
    )
    parser.add_argument("--peer", action="store_true", help="ask mlx_lm.server too")
    parser.add_argument(
        "--compact", action="store_true",
        help="the model writes calls without spaces, unlike its template",
    )  # fmt: skip
    parser.add_argument(
        "--required", action="store_true",
        help="each third request says that its answer must be a call",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parse_traces(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
