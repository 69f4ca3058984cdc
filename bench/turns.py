"""
The time to the first token, turn by turn: docs/turns.png.

    python -m bench turns [--model FOLDER] [--turns 20] [--tokens 400] [--png FILE]

An agent's conversation: each turn adds a tool's result, and the clock, a message id and
a billing line of the system text are new in every request. Each request is sent twice:
as the next turn, and once more to a server that was just cleared.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.blas import build_shim
from bench.options import positive
from bench.servers import Setup, make_if_absent, sidecar

_WORDS = ("file", "test", "line", "class", "value", "error", "index", "path", "name")
Json = dict[str, Any]


def main(argv: list[str]) -> int:
    """Exit code 0; the figures go to standard output, the picture to a file."""
    parser = argparse.ArgumentParser(prog="python -m bench turns", description=__doc__)
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--turns", type=positive, default=20)
    parser.add_argument(
        "--tokens", type=positive, default=400, help="new ones each turn"
    )
    parser.add_argument("--png", type=Path, help="draw it into this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or Path(scratch) / "model").resolve()
        tree = Path(__file__).parents[1]
        shim = build_shim(Path(scratch))  # the wheel's own BLAS is far slower
        setup = Setup(model, shim, tree, Path(scratch))
        make_if_absent(setup)
        with sidecar(setup) as port:
            warm = [*_turns(port, options.turns, options.tokens, is_cleared=False)]
            cold = [*_turns(port, options.turns, options.tokens, is_cleared=True)]
    for number, (one, other) in enumerate(zip(warm, cold, strict=True), 1):
        sys.stdout.write(
            f"turn {number}: {one[0]} tokens, {1000 * one[1]:.0f} ms; "
            f"nothing kept: {1000 * other[1]:.0f} ms\n"
        )
    ratio = warm[-1][1] / warm[1][1]
    sys.stdout.write(f"the last turn takes {ratio:.2f} of the second one's time\n")
    if options.png is not None:
        draw([w[1] for w in warm], [c[1] for c in cold], options.png)
    return 0


def _turns(
    port: int, num_turns: int, num_tokens: int, *, is_cleared: bool
) -> Iterator[tuple[int, float]]:
    """Tokens of each turn's prompt, and seconds to its first token."""
    chance = random.Random(7)
    _post(port, "/admin/cache/clear", {})
    talk: list[Json] = [{"role": "system", "content": ""}]
    for number in range(num_turns):
        text = " ".join(chance.choices(_WORDS, k=num_tokens))
        talk += [{"role": "user", "content": f"Result {number}: {text}"}]
        talk[0]["content"] = _system(number)
        if is_cleared:
            _post(port, "/admin/cache/clear", {})
        found, said = _ask(port, talk)
        yield found
        talk += [{"role": "assistant", "content": said}]


def _system(number: int) -> str:
    """A system text with what drifts in agents' prompts."""
    return (
        f"x-anthropic-billing-header: cc_version=2.1.177.{number:03x}; "
        f"cc_entrypoint=cli; cch={number * 7919 % 65521:05x};\n"
        "You are an agent in a repository. "
        + "Read before you write, and test what you change. " * 30
        + f'\n{{"message_id": "m{number:04d}"}}\n'
        + f"Current time: 2026-11-20T09:{number:02d}:00Z\n"
    )


def _ask(port: int, talk: Sequence[Json]) -> tuple[tuple[int, float], str]:
    body = {
        "messages": talk,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "session_id": "turns",
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    began, first_s, said, num_tokens = time.perf_counter(), 0.0, "", 0
    head = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
    answer = connection.getresponse()
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event["choices"]:
            delta = choice["delta"]
            if not first_s and (delta.get("content") or delta.get("reasoning_content")):
                first_s = time.perf_counter() - began
            said += delta.get("content") or ""
        num_tokens = (event.get("usage") or {}).get("prompt_tokens", num_tokens)
    connection.close()
    return (num_tokens, first_s or time.perf_counter() - began), said


def _post(port: int, path: str, body: Json) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    head = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), head)
    connection.getresponse().read()
    connection.close()


def draw(warm: Sequence[float], cold: Sequence[float], file: Path) -> None:
    """
    Write the picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3))
    numbers = range(1, len(warm) + 1)
    axis.plot(numbers, cold, color="C1", marker=".", label="nothing kept")
    axis.plot(numbers, warm, color="C0", marker=".", label="litellm-mlx")
    axis.set_xlabel("turn of an agent whose clock, ids and billing line drift")
    axis.set_ylabel("seconds to the first token")
    axis.set_xticks([1, *range(5, len(warm) + 1, 5)])
    axis.set_ylim(0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
