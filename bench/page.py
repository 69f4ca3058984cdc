"""
What open admin pages cost running streams, and how soon they are answered.

    python -m bench page [--model FOLDER] [--pages 3] [--streams 8] [--rounds 6]

A process of its own asks what the page asks, once a second, one page a tenth of a
second after the other, while the streams run. Tokens that came in the half second from
the first one on are compared with those of the half second before: a machine that
changes its speed from one second to the next changes both. What open pages cost is paid
in that first half, so the rate beside them is the mean of both. A browser's own work is
not counted: it draws on other cores than the model's, or on this machine's two.
"""

import argparse
import bisect
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.blas import build_shim
from bench.clients import Answer, ask_all
from bench.options import positive, several
from bench.prompts import random_ids
from bench.servers import Setup, make_if_absent, sidecar

_HALF_S = 0.5
_WARM_UP = 64  # tokens
_PAGES = """
import json, sys, threading, time, httpx
url, pages = sys.argv[1], int(sys.argv[2])
times, began, closed = [], [], threading.Event()
together = threading.Barrier(pages, action=lambda: began.append(time.perf_counter()))
def page(number):
    client, last = httpx.Client(), 0
    while True:
        together.wait()
        time.sleep(0.1 * number)
        asked = time.perf_counter()
        client.get(url + "/admin/state")
        times.append(time.perf_counter() - asked)
        lines = client.get(url + f"/admin/logs?after={last}").json()["lines"]
        last = lines[-1]["n"] if lines else last
        if closed.wait(max(0.0, began[-1] + 1.0 - time.perf_counter())):
            together.abort()
            return
threading.excepthook = lambda fault: None  # pages that wait for others at the end
threads = [threading.Thread(target=page, args=(n,)) for n in range(pages)]
for thread in threads: thread.start()
sys.stdin.read()
closed.set()
for thread in threads: thread.join()
print(json.dumps({"times": times, "began": began}))
"""


def main(argv: list[str]) -> int:
    """Exit code 0; the figures go to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench page", description=__doc__)
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--pages", type=positive, default=3)
    parser.add_argument("--streams", type=positive, default=8)
    parser.add_argument("--max-tokens", type=several, default=200)
    parser.add_argument("--rounds", type=positive, default=6)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or Path(scratch) / "model").resolve()
        settings = {"SPECULATION": "off", "BATCH_MAX_SIZE": str(options.streams)}
        tree = Path(__file__).parents[1]
        shim = build_shim(Path(scratch))  # the wheel's own BLAS is far slower
        setup = Setup(model, shim, tree, Path(scratch), settings=settings)
        make_if_absent(setup)
        rounds = list[list[Answer]]()
        with sidecar(setup) as port:
            _streams(port, options.streams, _WARM_UP)
            with _open_pages(port, options.pages) as found:
                for _ in range(options.rounds):
                    rounds.append(_streams(port, options.streams, options.max_tokens))
    pairs = [pair for answers in rounds for pair in _halves(answers, found["began"])]
    sys.stdout.write(_report(pairs, sorted(found["times"]), options.pages))
    return 0


@contextlib.contextmanager
def _open_pages(port: int, num_pages: int) -> Iterator[dict[str, Any]]:
    """Pages that are open meanwhile; behind it when they asked, and what it took."""
    found: dict[str, Any] = {}
    command = [sys.executable, "-c", _PAGES, f"http://127.0.0.1:{port}", str(num_pages)]
    pages = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield found
        found.update(json.loads(pages.communicate(timeout=60)[0]))
    finally:
        pages.kill()
        pages.wait()


def _streams(port: int, count: int, max_tokens: int) -> list[Answer]:
    bodies = [{"prompt": random_ids(64)} for _ in range(count)]
    return ask_all(port, "/v1/completions", bodies, max_tokens)


def _halves(answers: list[Answer], asked: list[float]) -> list[tuple[int, int]]:
    """Tokens of all streams after and before each time that the pages asked."""
    begun = max(answer.first for answer in answers)
    ended = min(answer.last for answer in answers)
    times = sorted(time for answer in answers for time in answer.times)

    def between(start: float, end: float) -> int:
        return bisect.bisect_left(times, end) - bisect.bisect_left(times, start)

    return [
        (between(at, at + _HALF_S), between(at - _HALF_S, at))
        for at in asked
        if begun <= at - _HALF_S and at + _HALF_S <= ended
    ]


def _report(pairs: list[tuple[int, int]], times: list[float], num_pages: int) -> str:
    if len(pairs) < 2:
        raise ValueError("the streams were too short: give --max-tokens")
    beside, without = (sum(side) for side in zip(*pairs, strict=True))
    # The error of a ratio of sums, from what is left of each pair.
    rest = [after - beside / without * before for after, before in pairs]
    error = statistics.stdev(rest) * len(pairs) ** 0.5 / without
    return (
        f"rate beside {num_pages} pages: {(1 + beside / without) / 2:.4f} of the rate "
        f"without (standard error {error / 2:.4f}, {len(pairs)} times asked); "
        f"/admin/state median {1000 * statistics.median(times):.1f} ms, "
        f"p99 {1000 * times[int(len(times) * 0.99)]:.1f}\n"
    )
