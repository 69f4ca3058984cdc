"""
What the sidecar costs over plain mlx-lm and against mlx_lm.server, as ratios.

    python -m bench overhead [--runs 7] [--json FILE]

Ours and theirs take turns on the same prompts while the other is idle, each first in
every other pair, so that what else the machine does falls on both. A bar is held
against the median over the pairs. Exit code 1 if a bar failed.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report, table
from bench.blas import build_shim
from bench.clients import Answer, complete
from bench.facts import facts
from bench.plain import PlainProcess
from bench.prompts import PromptSource
from bench.servers import Setup, make_if_absent, mlx_lm_server, plain_process, sidecar

_REPOSITORY = Path(__file__).parents[1]
_STREAMS = (1, 4, 8)
_OPPONENTS = ("plain", "server")
_SHORT_PROMPT, _SHORT_ANSWER = 32, 4
_SINGLE_FACTOR = 4  # a single stream is short, and as noisy as many
_PAUSE_S = 0.2  # what a server still does after its last token
_PLAIN_TTFT = (report.Bar("ttft_s", "ms more <=", 8.0),)
_PLAIN_BARS = (report.Bar("decode_tps", "ratio >=", 0.95), *_PLAIN_TTFT)
_SERVER_TTFT = (report.Bar("ttft_s", "ratio <=", 1.03),)
_SERVER_BARS = (
    report.Bar("total_tps", "ratio >=", 0.97),
    report.Bar("decode_tps", "ratio >=", None),
    *_SERVER_TTFT,
    report.Bar("ttft_p95_s", "ratio <=", None),
)

Side = Callable[[list[str], int], list[Answer]]
Bars = Sequence[report.Bar]


@dataclass(frozen=True, slots=True)
class Workload:
    """One comparison: how many streams of what size, how often, held against what."""

    title: str
    num_streams: int
    prompt_tokens: int
    shortest_prompt: int | None
    max_tokens: int
    runs: int
    bars: Bars


def main(argv: list[str] | None = None) -> int:
    """Measure, print, judge."""
    options = _parser().parse_args(argv)
    facts = _facts(options)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    comparisons = _measure(options)
    print("\n" + table.table(comparisons))
    result = table.as_json(comparisons, facts)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("all bars passed" if result["passed"] else "A BAR FAILED")
    return 0 if result["passed"] else 1


def _measure(options: argparse.Namespace) -> list[report.Comparison]:
    with contextlib.ExitStack() as running:
        setup = _prepare(options, running)
        prompts = PromptSource(setup.model / "tokenizer.json", options.seed)
        ours = _server_side(running.enter_context(sidecar(setup)))
        comparisons = []
        if "plain" in options.against:
            plain = running.enter_context(plain_process(setup))
            plan = _plan_plain(options)
            comparisons += _compare(ours, _plain_side(plain), prompts, plan)
        if "server" in options.against:
            theirs = _server_side(running.enter_context(mlx_lm_server(setup)))
            plan = _plan_server(options)
            comparisons += _compare(ours, theirs, prompts, plan)
    return comparisons


def _plan_plain(options: argparse.Namespace) -> list[Workload]:
    return [
        _long(options, "stream_generate, 1 stream", 1, _PLAIN_BARS),
        _short(options, "stream_generate, short prompt", _PLAIN_TTFT),
    ]


def _plan_server(options: argparse.Namespace) -> list[Workload]:
    plan = [
        _long(options, f"mlx_lm.server, {n} stream{'s' * (n > 1)}", n, _SERVER_BARS)
        for n in options.streams
    ]
    if options.short_runs:
        plan.append(_short(options, "mlx_lm.server, short prompt", _SERVER_TTFT))
    return plan


def _long(
    options: argparse.Namespace, title: str, num_streams: int, bars: Bars
) -> Workload:
    sizes = options.prompt_tokens, options.shortest, options.max_tokens
    runs = options.runs * (_SINGLE_FACTOR if num_streams == 1 else 1)
    return Workload(title, num_streams, *sizes, runs, bars)


def _short(options: argparse.Namespace, title: str, bars: Bars) -> Workload:
    """Many quick pairs: a fixed cost drowns in the noise of a long prefill."""
    sizes = _SHORT_PROMPT, None, _SHORT_ANSWER
    return Workload(title, 1, *sizes, options.short_runs, bars)


def _compare(
    ours: Side, theirs: Side, prompts: PromptSource, plan: Sequence[Workload]
) -> list[report.Comparison]:
    return [
        report.Comparison(
            work.title, work.num_streams, _pairs(ours, theirs, prompts, work), work.bars
        )
        for work in plan
    ]


def _prepare(options: argparse.Namespace, running: contextlib.ExitStack) -> Setup:
    options.work_dir.mkdir(parents=True, exist_ok=True)
    scratch = running.enter_context(tempfile.TemporaryDirectory(prefix="overhead-"))
    setup = Setup(
        options.model or options.work_dir / "medium-1",
        build_shim(options.work_dir),
        options.tree.resolve(),
        Path(scratch),
    )
    make_if_absent(setup)
    return setup


def _server_side(port: int) -> Side:
    return lambda prompts, max_tokens: complete(port, prompts, max_tokens)


def _plain_side(plain: PlainProcess) -> Side:
    return lambda prompts, max_tokens: [plain.complete(p, max_tokens) for p in prompts]


def _pairs(
    ours: Side, theirs: Side, prompts: PromptSource, work: Workload
) -> list[report.Pair]:
    """Interleaved runs, after one on each side that is not counted."""
    pairs = []
    print(f"\n{work.title}: ours | theirs, each pair on the same prompts")
    for number in range(work.runs + 1):
        batch = prompts.batch(
            work.num_streams, work.prompt_tokens, work.shortest_prompt
        )
        answers = {}
        for side in (ours, theirs) if number % 2 else (theirs, ours):
            answers[side] = side(batch, work.max_tokens)
            time.sleep(_PAUSE_S)
        pair = report.pair_of(answers[ours], answers[theirs], work.max_tokens)
        if number:
            pairs.append(pair)
            print(f"{number:>3} {_brief(pair.ours)} | {_brief(pair.theirs)} | "
                  f"equal texts {pair.num_equal_texts}/{work.num_streams}",
                  flush=True)  # fmt: skip
    return pairs


def _brief(run: report.Run) -> str:
    return (
        f"total {run.total_tps:6.1f} tok/s  decode {run.decode_tps:6.1f} tok/s  "
        f"ttft {run.ttft_s * 1000:6.0f} p95 {run.ttft_p95_s * 1000:6.0f} ms"
    )


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **facts(),
        "model": str(options.model or "random qwen3, 52 M parameters, float32"),
        "runs": f"{options.runs}, {options.runs * _SINGLE_FACTOR} (one stream) and "
        f"{options.short_runs} (short prompt) pairs, greedy, "
        f"seed {options.seed}; {options.max_tokens} tokens for prompts up to "
        f"{options.prompt_tokens}; short: {_SHORT_ANSWER} for {_SHORT_PROMPT}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__.split("\n\n")[0].strip()
    )
    default_dir = Path(tempfile.gettempdir()) / "litellm-mlx-bench"
    add = parser.add_argument
    add(
        "--runs",
        type=int,
        default=7,
        help="pairs of each comparison, 4 times that for one stream (7)",
    )
    add("--short-runs", type=int, default=60, help="pairs of short prompts (60)")
    add("--streams", type=_counts, default=_STREAMS, help="stream counts (1,4,8)")
    add(
        "--against",
        type=_opponents,
        default=_OPPONENTS,
        help="plain (stream_generate), server (mlx_lm.server), or plain,server (both)",
    )
    add("--max-tokens", type=int, default=128, help="tokens of an answer (128)")
    add("--prompt-tokens", type=int, default=512, help="longest prompt (512)")
    add("--shortest", type=int, help="shortest prompt (half the longest)")
    add("--seed", type=int, default=0, help="of the prompts (0)")
    add("--model", type=Path, help="model folder (a random one is made)")
    add("--tree", type=Path, default=_REPOSITORY, help="whose sidecar (this one)")
    add("--work-dir", type=Path, default=default_dir, help=f"kept ({default_dir})")
    add("--json", type=Path, help="also write everything to this file")
    return parser


def _opponents(text: str) -> Sequence[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in _OPPONENTS]:
        known = " or ".join(_OPPONENTS)
        raise argparse.ArgumentTypeError(f"must be {known}, got {unknown[0]!r}")
    return names


def _counts(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
