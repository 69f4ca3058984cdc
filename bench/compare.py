"""
Every server on equal work, in one run.

    python -m bench compare [--runs 5] [--json FILE] [--plot FILE.png]

Ours straight, ours through the LiteLLM proxy, mlx_lm.server and what else is installed
answer the same chats: same weights, same template, greedy, and a model that never ends
an answer by itself. `--peer "NAME=COMMAND"` adds any OpenAI-compatible server; {port}
and {model} in the command are filled in.
They take turns while the others are idle, in an order that rotates. If servers count
different tokens for a new chat, or one ends early, the run ends: they did other work.
(The next turn may differ by a few: ours keeps the marks of thinking in past answers.)
Medians; TTFT is of the first piece of text.
"""

import argparse
import contextlib
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import plot
from bench.blas import build_shim
from bench.clients import Answer, Json
from bench.contestants import Server, contestants, known_peers
from bench.facts import facts
from bench.prompts import PromptSource
from bench.report import InvalidRun
from bench.servers import Setup, make_if_absent

_REPOSITORY = Path(__file__).parents[1]
_PAUSE_S = 0.2
_STREAMS = (1, 4, 8)
_RUNNING = 4  # streams beside which a long prompt arrives
_TRIES = 6  # to have them run when it does, each with twice the tokens
_METRICS = (  # name, unit, what is better
    ("cold ttft p50", "ms"), ("cold ttft p95", "ms"),
    ("warm ttft p50", "ms"), ("warm ttft p95", "ms"),
    ("warm prefilled", "tokens"), ("decode", "tokens/s"),
    *((f"{n} streams", "tokens/s") for n in _STREAMS),
    ("newcomer ttft", "x solo"), ("p99 pause beside it", "ms"), ("peak rss", "MiB"),
)  # fmt: skip


class Work:
    """The chats of a run, and the proof that all servers read the same tokens."""

    def __init__(self, model: Path, seed: int) -> None:
        self._prompts = PromptSource(model / "tokenizer.json", seed)
        self._hash = hashlib.sha256()

    def talks(self, num_streams: int, longest: int) -> list[list[Json]]:
        """New questions, lengths as in the overhead bench."""
        texts = self._prompts.batch(num_streams, longest)
        self._hash.update("\0".join(texts).encode())
        return [[{"role": "user", "content": text}] for text in texts]

    @property
    def digest(self) -> str:
        """Of all that was asked."""
        return self._hash.hexdigest()[:16]


def main(argv: list[str] | None = None) -> int:
    """Measure, print, draw."""
    options = _parser().parse_args(argv)
    about = facts()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    with contextlib.ExitStack() as running:
        setup = _prepare(options, running)
        work = Work(setup.model, options.seed)
        servers = list(contestants(setup, known_peers(options.peer), running))
        for number in range(options.runs + 1):  # the first is not counted
            turn = servers[number % len(servers) :] + servers[: number % len(servers)]
            _round(turn, work, options)
            if not number:
                for server in servers:
                    server.seen.clear()
            print(f"round {number} of {options.runs} done", flush=True)
        for server in servers:
            _arrival(server, work, options)
    results = {server.name: _summary(server) for server in servers}
    print("\n" + _table(results) + f"\n\nsha256 of all questions: {work.digest}")
    if options.json:
        options.json.write_text(json.dumps({**about, "results": results}, indent=1))
    if options.plot:
        plot.draw(results, about, options.plot)
    return 0


def _round(servers: list[Server], work: Work, options: argparse.Namespace) -> None:
    """One round of equal work, server after server."""
    cold = work.talks(1, options.prompt_tokens)
    more = work.talks(1, 32)[0]
    batches = {n: work.talks(n, options.prompt_tokens) for n in _STREAMS if n > 1}
    sizes: dict[str, set[int]] = defaultdict(set)
    for server in servers:
        _one_stream(server, cold, more, options.max_tokens, sizes)
        for n, talks in batches.items():
            time.sleep(_PAUSE_S)
            answers = server.ask(talks, options.max_tokens)
            server.seen[f"{n} streams"].append(_rate(answers))
            sizes[f"{n} streams"].add(sum(a.num_prompt for a in answers))
        time.sleep(_PAUSE_S)
    for what, counts in sizes.items():
        if len(counts) > 1:
            raise InvalidRun(f"{what}: prompts of {sorted(counts)} tokens")


def _one_stream(
    server: Server,
    cold: list[list[Json]],
    more: list[Json],
    max_tokens: int,
    sizes: dict[str, set[int]],
) -> None:
    """A new chat, and its next turn."""
    first = server.ask(cold, max_tokens)[0]
    time.sleep(_PAUSE_S)
    reply = {"role": "assistant", "content": "All done."}
    second = server.ask([[*cold[0], reply, *more]], 8)[0]
    server.seen["cold ttft"].append(first.ttft_s * 1000)
    server.seen["decode"].append(first.decode_tps)
    server.seen["1 streams"].append(_rate([first]))
    server.seen["warm ttft"].append(second.ttft_s * 1000)
    server.seen["warm prefilled"].append(second.num_prompt - second.num_cached)
    sizes["cold"].add(first.num_prompt)


def _arrival(server: Server, work: Work, options: argparse.Namespace) -> None:
    """A long prompt alone, then one beside running streams."""
    solo = server.ask(work.talks(1, options.long_tokens), 4)[0]
    talks = work.talks(_RUNNING, 64)
    # Long enough to outlast the newcomer's prefill at a quarter of the rate.
    per_token = server.ask(talks, 16)[0]
    step_s = (per_token.last - per_token.first) / 15
    num_tokens = 32 + int(1.6 * solo.ttft_s / step_s)
    wait_s = 1.5 * (per_token.first - per_token.started) + 8 * step_s
    for _ in range(_TRIES):
        newcomer = work.talks(1, options.long_tokens)
        running = work.talks(_RUNNING, 64)
        with ThreadPoolExecutor(2) as both:
            streams = both.submit(server.ask, running, num_tokens)
            time.sleep(wait_s)
            late = both.submit(server.ask, newcomer, 4).result()[0]
            gaps = _gaps_beside(late, streams.result())
        if gaps:
            break
        num_tokens *= 2  # the streams ended before it came
    else:
        raise InvalidRun(f"{server.name}: {num_tokens // 2} tokens were too few")
    server.seen["newcomer ttft"].append(late.ttft_s / solo.ttft_s)
    server.seen["p99 pause beside it"].append(_quantile(gaps, 99) * 1000)


def _gaps_beside(late: Answer, answers: list[Answer]) -> list[float]:
    """Seconds between tokens of streams while a newcomer waits for its first."""
    return [
        after - before
        for answer in answers
        for before, after in zip(answer.times, answer.times[1:], strict=False)
        if late.started <= after and before <= late.first
    ]


def _rate(answers: list[Answer]) -> float:
    seconds = max(a.last for a in answers) - min(a.started for a in answers)
    return sum(a.num_generated for a in answers) / seconds


def _quantile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[percent - 1]


def _summary(server: Server) -> dict[str, float]:
    found = {
        name: statistics.median(values)
        for name, values in server.seen.items()
        if not name.endswith("ttft") or name == "newcomer ttft"
    }
    for kind in ("cold ttft", "warm ttft"):
        found[f"{kind} p50"] = statistics.median(server.seen[kind])
        found[f"{kind} p95"] = _quantile(server.seen[kind], 95)
    found["peak rss"] = server.peak_bytes / (1 << 20)
    return found


def _table(results: dict[str, dict[str, float]]) -> str:
    names = list(results)
    lines = [f"{'':<22}{'':<10}" + "".join(f"{name:>22}" for name in names)]
    for metric, unit in _METRICS:
        found = [results[name].get(metric) for name in names]
        cells = "".join(f"{'-' if v is None else f'{v:.1f}':>22}" for v in found)
        lines.append(f"{metric:<22}{unit:<10}{cells}")
    return "\n".join(lines)


def _prepare(options: argparse.Namespace, running: contextlib.ExitStack) -> Setup:
    options.work_dir.mkdir(parents=True, exist_ok=True)
    scratch = running.enter_context(tempfile.TemporaryDirectory(prefix="compare-"))
    setup = Setup(
        options.model or options.work_dir / "medium-1",
        build_shim(options.work_dir),
        _REPOSITORY,
        Path(scratch),
    )
    make_if_absent(setup)
    return setup


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=__doc__.split("\n\n")[0].strip()
    )
    default_dir = Path(tempfile.gettempdir()) / "litellm-mlx-bench"
    add = parser.add_argument
    add("--runs", type=int, default=5, help="rounds that count (5)")
    add("--max-tokens", type=int, default=64, help="tokens of an answer (64)")
    add("--prompt-tokens", type=int, default=512, help="longest prompt (512)")
    add("--long-tokens", type=int, default=8192, help="the arriving prompt (8192)")
    add("--seed", type=int, default=0, help="of the questions (0)")
    add("--model", type=Path, help="model folder (a random one is made)")
    add("--work-dir", type=Path, default=default_dir, help=f"kept ({default_dir})")
    add("--peer", action="append", default=[], help='"NAME=COMMAND", any number')
    add("--json", type=Path, help="also write everything to this file")
    add("--plot", type=Path, help="also draw it (needs matplotlib)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
