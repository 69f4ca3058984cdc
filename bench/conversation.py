"""
Time to the first token along an agent's conversation, beside mlx_lm.server.

    python -m bench.conversation [--runs 3] [--turns 20] [--json FILE]

The built-in model (on Linux with float32 weights: the CPU's BLAS has no bfloat16); the
prompt grows by tool results from about 2,000 to 8,000 tokens. Both servers get the
same bodies, one right after the other; what the sidecar answered becomes the history
of both. First as agents are: thinking is thrown away, a clock and a message id change
with every request. Then without the two. A turn is one request; every other one brings
a tool's result.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.agent import Agent
from bench.blas import build_shim
from bench.models import is_made
from bench.servers import Setup, mlx_lm_server, run_python, sidecar
from bench.streams import Streamed, stream_chat

_REPOSITORY = Path(__file__).parents[1]
_BUILTIN = _REPOSITORY / "sidecar" / "builtin_model"
_REQUEST_S = 600.0
_PAUSE_S = 0.1  # what a server still does after its last token
_FIELDS = {
    "temperature": 0.0,
    "max_tokens": 96,
    # What the sidecar sets by default, said so that both templates do the same.
    "chat_template_kwargs": {"enable_thinking": True, "preserve_thinking": True},
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to both, medians over the runs."""

    prompt_len: int
    ours_s: float
    ours_prefilled: int
    theirs_s: float
    theirs_prefilled: int


def main(argv: list[str] | None = None) -> int:
    """Talk, print."""
    options = _parser().parse_args(argv)
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as running:
        scratch = running.enter_context(tempfile.TemporaryDirectory(prefix="talk-"))
        setup = _prepare(options.work_dir, Path(scratch))
        ours = _client(running, running.enter_context(sidecar(setup)))
        theirs = _client(running, running.enter_context(mlx_lm_server(setup)))
        for title, is_volatile in (
            ("a clock and a message id change with every request", True),
            ("nothing changes, messages are only appended", False),
        ):
            turns = _measure(options, ours, theirs, is_volatile=is_volatile)
            print(f"\n{title}, median of {options.runs}:\n\n{_table(turns)}")
            result[title] = [asdict(turn) for turn in turns]
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _prepare(work_dir: Path, scratch: Path) -> Setup:
    work_dir.mkdir(parents=True, exist_ok=True)
    shim = build_shim(work_dir)
    if shim is None:
        return Setup(_BUILTIN, None, _REPOSITORY, scratch)
    setup = Setup(work_dir / "builtin-float32", shim, _REPOSITORY, scratch)
    if not is_made(setup.model):
        run_python(setup, ["-m", "bench.float32", str(setup.model)])
    return setup


def _measure(
    options: argparse.Namespace,
    ours: httpx.Client,
    theirs: httpx.Client,
    *,
    is_volatile: bool,
) -> list[Turn]:
    """Conversations that share no beginning, turn by turn on both sides."""
    runs = []
    for number in range(options.runs):
        seed = options.seed + 2 * number + is_volatile
        agent = Agent(
            _BUILTIN / "tokenizer.json", seed, options.result_tokens,
            is_volatile=is_volatile,
        )  # fmt: skip
        runs.append([_turn(agent, ours, theirs) for _ in range(options.turns)])
    return [_median(pairs) for pairs in zip(*runs, strict=True)]


def _turn(
    agent: Agent, ours: httpx.Client, theirs: httpx.Client
) -> tuple[Streamed, Streamed]:
    body = {**agent.body(), **_FIELDS}
    mine = stream_chat(ours, body)
    time.sleep(_PAUSE_S)
    other = stream_chat(theirs, body)
    time.sleep(_PAUSE_S)
    agent.hear(mine.message)
    return mine, other


def _median(pairs: Sequence[tuple[Streamed, Streamed]]) -> Turn:
    def median(side: int, value: str) -> float:
        return statistics.median(getattr(pair[side], value) for pair in pairs)

    return Turn(
        int(median(1, "prompt_len")),
        median(0, "ttft_s"),
        int(median(0, "prompt_len") - median(0, "cached_len")),
        median(1, "ttft_s"),
        int(median(1, "prompt_len") - median(1, "cached_len")),
    )


def _table(turns: Sequence[Turn]) -> str:
    lines = [
        "| turn | prompt | prefilled, ours | mlx_lm.server | TTFT, ours "
        "| mlx_lm.server | theirs / ours |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {number} | {t.prompt_len:,} | {t.ours_prefilled:,} "
        f"| {t.theirs_prefilled:,} | {t.ours_s * 1000:,.0f} ms "
        f"| {t.theirs_s * 1000:,.0f} ms | {t.theirs_s / t.ours_s:.1f} |"
        for number, t in enumerate(turns, 1)
    ]
    early, late = turns[1], turns[-1]
    lines.append(
        f"| **last / turn 2** | {late.prompt_len / early.prompt_len:.1f} | | "
        f"| **{late.ours_s / early.ours_s:.2f}** "
        f"| **{late.theirs_s / early.theirs_s:.2f}** | |"
    )
    return "\n".join(lines)


def _client(running: contextlib.ExitStack, port: int) -> httpx.Client:
    return running.enter_context(
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_S, trust_env=False
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.conversation",
        description=(__doc__ or "").split("\n\n")[0],
    )
    default_dir = Path(tempfile.gettempdir()) / "litellm-mlx-bench"
    add = parser.add_argument
    add("--runs", type=int, default=3, help="conversations of each kind (3)")
    add("--turns", type=int, default=20, help="requests of a conversation (20)")
    add("--result-tokens", type=int, default=520, help="of a tool's result (520)")
    add("--seed", type=int, default=0, help="of the texts (0)")
    add("--work-dir", type=Path, default=default_dir, help=f"kept ({default_dir})")
    add("--json", type=Path, help="also write everything to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
