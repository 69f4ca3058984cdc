"""
What writing KV to the disk costs those who talk meanwhile.

    python -m bench writes [--model FOLDER | --large] [--talks 6] [--rest 1]

Two sidecars on one model in one run: one writes its KV, one does not. They have the
same talks in turns, so that what a talk has said is written beside its own later turns.
A turn's seconds, from the request to its last token, are compared turn by turn.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.models import is_made, make
from bench.servers import Setup, peer_server

_TIMEOUT_S = 600.0
_SETTLE_S = 60.0
Message = dict[str, Any]


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch, ExitStack() as up:
        root = Path(scratch)
        model = options.model or root / "model"
        if not is_made(model):
            make(model, "--large" if options.large else "--small")
        setup = Setup(model, None, Path(__file__).parents[1], root)
        on = up.enter_context(_client(setup, "on", _writing(root, options.rest)))
        off = up.enter_context(_client(setup, "off", {}))
        _compare(on, off, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench writes", description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="a folder; where none is, it is made"
    )
    parser.add_argument("--large", action="store_true", help="8 B, for a GPU")
    parser.add_argument("--talks", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8, help="of a talk")
    parser.add_argument("--words", type=int, default=200, help="that a turn adds")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--pause", type=float, default=1.5, help="s between two turns")
    parser.add_argument("--rest", type=int, default=1, help="KV_DISK_QUIET_SECONDS")
    parser.add_argument("--scratch", help="where the files go")
    return parser


def _writing(root: Path, rest: int) -> dict[str, str]:
    return {
        "KV_DISK_PERSISTENCE": "true", "KV_DISK_PATH": str(root / "kv"),
        "KV_DISK_QUIET_SECONDS": str(rest), "KV_DISK_MIN_FREE_GB": "0",
        "KV_DISK_MAX_WRITE_GB_PER_DAY": "0",
    }  # fmt: skip


@contextmanager
def _client(
    setup: Setup, name: str, settings: dict[str, str]
) -> Iterator[httpx.Client]:
    """A client of a sidecar of its own."""
    told = setup.scratch / f"{name}.env"
    told.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    command = "python -m sidecar --port {port} --model {model} --env-file " + str(told)
    with peer_server(setup, name, command) as port:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as client:
            yield client


def _compare(on: httpx.Client, off: httpx.Client, options: argparse.Namespace) -> None:
    for client in (on, off):  # kernels; of those of the disk as well
        _talk(client, options, "warm-up")
        _settle(client)
    ratios: list[float] = []
    for number in range(options.talks):
        seconds: dict[httpx.Client, list[float]] = {}
        for client in (on, off) if number % 2 else (off, on):
            seconds[client] = _talk(client, options, f"talk {number}")
            _settle(client)
        # The first turn computes what nobody has: nothing is written beside it.
        pairs = list(zip(seconds[on], seconds[off], strict=True))[1:]
        ratios.append(sum(a for a, _ in pairs) / sum(b for _, b in pairs))
        sys.stdout.write(f"talk {number}: on / off {ratios[-1]:.3f}\n")
        sys.stdout.flush()
    written = _disk(on)
    sys.stdout.write(
        f"writing on / off: median {statistics.median(ratios):.3f}, "
        f"{min(ratios):.3f} to {max(ratios):.3f}; {written / 1e6:.0f} MB written\n"
    )


def _talk(client: httpx.Client, options: argparse.Namespace, seed: str) -> list[float]:
    """Seconds of each turn."""
    chance, said, seconds = random.Random(seed), list[Message](), list[float]()
    for number in range(options.turns):
        count = options.words * (1 if number else 4)
        words = " ".join(f"w{chance.randrange(1000)}" for _ in range(count))
        said.append({"role": "user", "content": words})
        body = {"messages": said, "max_tokens": options.tokens, "temperature": 0}
        started = time.perf_counter()
        answer = client.post("/v1/chat/completions", json=body).raise_for_status()
        seconds.append(time.perf_counter() - started)
        message = answer.json()["choices"][0]["message"]
        said.append({"role": "assistant", "content": message["content"]})
        time.sleep(options.pause)
    return seconds


def _settle(client: httpx.Client) -> None:
    """Wait until nothing is written any more: the other server talks alone then."""
    deadline, before = time.monotonic() + _SETTLE_S, -1
    while (written := _disk(client)) != before and time.monotonic() < deadline:
        before = written
        time.sleep(3)


def _disk(client: httpx.Client) -> int:
    """Bytes written to the disk."""
    report = client.get("/admin/cache").raise_for_status().json()
    return int(report["counters"].get("disk_bytes_written", 0))
