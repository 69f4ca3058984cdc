"""
What open admin pages cost running streams, and how soon they are answered.

    python -m bench page [--model FOLDER] [--pages 3] [--streams 8] [--rounds 6]

A process of its own asks what the page asks, as often, for so many pages; the rate of
the streams with it and without, in turns. A browser's own work is not counted: it draws
on other cores than the model's, or on this machine's two.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.blas import build_shim
from bench.clients import ask_all
from bench.prompts import random_ids
from bench.servers import Setup, make_if_absent, sidecar

_PAGES = """
import sys, threading, time, httpx
url, pages, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
times, until = [], time.monotonic() + seconds
def page():
    client = httpx.Client()
    while time.monotonic() < until:
        began = time.perf_counter()
        client.get(url + "/admin/state")
        times.append(time.perf_counter() - began)
        client.get(url + "/admin/logs?after=0")
        time.sleep(1)
threads = [threading.Thread(target=page) for _ in range(pages)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*times)
"""


def main(argv: list[str]) -> int:
    """Exit code 0; the figures go to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench page", description=__doc__)
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or Path(scratch) / "model").resolve()
        settings = {"SPECULATION": "off", "BATCH_MAX_SIZE": str(options.streams)}
        tree = Path(__file__).parents[1]
        shim = build_shim(Path(scratch))  # the wheel's own BLAS is far slower
        setup = Setup(model, shim, tree, Path(scratch), settings=settings)
        make_if_absent(setup)
        ratios, times = list[float](), list[float]()
        with sidecar(setup) as port:
            took_s = _streams(port, options)  # warms up
            for _ in range(options.rounds):
                alone_s = _streams(port, options)
                pages = _open_pages(port, options.pages, took_s)
                ratios.append(alone_s / _streams(port, options))
                times += [float(t) for t in pages.communicate(timeout=600)[0].split()]
    times.sort()
    sys.stdout.write(
        f"rate beside {options.pages} pages: {statistics.median(ratios):.3f} of the "
        f"rate without ({min(ratios):.3f} to {max(ratios):.3f}); /admin/state "
        f"median {1000 * statistics.median(times):.1f} ms, "
        f"p99 {1000 * times[int(len(times) * 0.99)]:.1f}\n"
    )
    return 0


def _open_pages(port: int, num_pages: int, seconds: float) -> subprocess.Popen[str]:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", _PAGES, url, str(num_pages), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _streams(port: int, options: argparse.Namespace) -> float:
    """Seconds that all streams take."""
    bodies = [{"prompt": random_ids(64)} for _ in range(options.streams)]
    began = time.perf_counter()
    ask_all(port, "/v1/completions", bodies, options.max_tokens)
    return time.perf_counter() - began
