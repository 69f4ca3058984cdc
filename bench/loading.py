"""
A stream while another model is loaded: what its reader waits between two tokens.

    python -m bench loading [--megabytes 420 | --model FOLDER] [--rounds 3]

One sidecar, two models. The small one streams; meanwhile the large one is asked for,
loaded, and unloaded again: its weights from a file, its rope one whose tables stay lazy
(llama3); or it is a model of yours. Idle and loading stretches alternate in one run and
are compared by it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from bench.servers import Setup, peer_server
from testkit.tiny_models import make_model

_TIMEOUT_S = 600.0
_LAYER_BYTES = 25 << 20  # of 1024 wide in fp32
_WIDTH = 1024
_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
_ASKED = [{"role": "user", "content": "count for me, and do not stop"}]


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        _make_models(root / "models", options.megabytes << 20, options.model)
        setup = Setup(root / "models" / "small", None, Path(__file__).parents[1], root)
        command = "python -m sidecar --port {port} --model {model} --model-dir "
        with peer_server(setup, "sidecar", command + str(root / "models")) as port:
            _run(f"http://127.0.0.1:{port}", options.rounds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench loading", description=__doc__
    )
    parser.add_argument("--megabytes", type=int, default=420, help="of the large model")
    parser.add_argument("--model", type=Path, help="to load instead of one made here")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def _make_models(folder: Path, num_bytes: int, given: Path | None) -> None:
    make_model(folder / "small", "dense", layers=4, hidden=128)
    if given is not None:
        (folder / "large").symlink_to(given.resolve())
        return
    layers = max(1, num_bytes // _LAYER_BYTES)
    large = make_model(folder / "large", "dense", layers=layers, hidden=_WIDTH)
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "rope_scaling": _ROPE}))


def _run(url: str, rounds: int) -> None:
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
        _load_and_answer(http)  # once, so that its files are in the page cache
        _unload(http)
        idle: list[float] = []
        loading: list[float] = []
        seconds: list[float] = []
        for _ in range(rounds):
            started = time.perf_counter()
            loading += _gaps_beside(url, lambda: _load_and_answer(http))
            seconds.append(time.perf_counter() - started)
            _unload(http)
            idle += _gaps_beside(url, lambda: time.sleep(seconds[-1]))
    sys.stdout.write(f"a load and an answer: {statistics.median(seconds):.2f} s\n")
    for name, gaps in (("idle", idle), ("while another model loads", loading)):
        sys.stdout.write(_line(name, gaps))
    bar_ms = 2 * 1000 * _quantile(idle, 0.99) + 20
    sys.stdout.write(f"bar for p99: 2 x idle + 20 ms = {bar_ms:.0f} ms\n")


def _load_and_answer(http: httpx.Client) -> None:
    body = {"model": "large", "messages": _ASKED, "max_tokens": 1}
    while True:
        answer = http.post("/v1/chat/completions", json=body)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # still loading
            answer.raise_for_status()
            return


def _unload(http: httpx.Client) -> None:
    http.post("/admin/models/large/unload").raise_for_status()


def _gaps_beside(url: str, act: Callable[[], None]) -> list[float]:
    """Seconds between a stream's pieces while something else is done."""
    begun, over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(_read, url, begun, over)
        begun.wait(_TIMEOUT_S)
        act()
        over.set()
        return reading.result(_TIMEOUT_S)


def _read(url: str, begun: threading.Event, over: threading.Event) -> list[float]:
    body = {"model": "small", "messages": _ASKED, "max_tokens": 200_000, "stream": True}
    gaps: list[float] = []
    with (
        httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        last: float | None = None
        for piece in answer.iter_raw():
            if not piece.startswith(b"data:"):
                continue
            now = time.perf_counter()
            if last is not None and begun.is_set():
                gaps.append(now - last)
            last = now
            begun.set()
            if over.is_set():
                break
    return gaps


def _line(name: str, gaps: list[float]) -> str:
    ms = [1000 * _quantile(gaps, share) for share in (0.5, 0.99, 1.0)]
    return f"{name:28} p50 {ms[0]:6.1f}  p99 {ms[1]:6.1f}  most {ms[2]:6.0f} ms\n"


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
