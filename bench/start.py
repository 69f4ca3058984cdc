"""
From the start of a process to its first answer, beside plain mlx-lm.

    python -m bench start [--model FOLDER] [--rounds 3]

Three processes in turns: plain `mlx_lm.stream_generate`, a sidecar on a machine that
has not seen the model, and one that has. Each is asked for eight tokens as soon as it
can be reached. The ratios are of one round; the table has their medians.
"""

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.options import positive
from bench.servers import Setup, plain_process, starting_sidecar

_ASKED = {"model": "local", "max_tokens": 8, "temperature": 0,
          "messages": [{"role": "user", "content": "Hello"}]}  # fmt: skip
_BUILTIN = Path(__file__).parents[1] / "sidecar" / "builtin_model"
_DEADLINE_S = 600.0


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench start", description=__doc__)
    parser.add_argument("--model", type=Path, default=_BUILTIN)
    parser.add_argument("--rounds", type=positive, default=3)
    options = parser.parse_args(argv)
    rounds = []
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as scratch:
            tree = Path(__file__).parents[1]
            setup = Setup(options.model.resolve(), None, tree, Path(scratch))
            found = [_plain_s(setup), _sidecar_s(setup), _sidecar_s(setup)]
        if number:  # the first one reads the files into the page cache
            rounds.append(found)
            sys.stderr.write(
                f"round {number}: {', '.join(f'{s:.1f}' for s in found)}\n"
            )
    sys.stdout.write(f"{'to the first answer':<22}{'seconds':>8}{'ratio':>7}\n")
    for index, name in enumerate(("plain mlx-lm", "sidecar, unseen", "sidecar, seen")):
        seconds = statistics.median(found[index] for found in rounds)
        ratio = statistics.median(found[index] / found[0] for found in rounds)
        sys.stdout.write(f"{name:<22}{seconds:>8.1f}{ratio:>7.2f}\n")
    return 0


def _plain_s(setup: Setup) -> float:
    started = time.perf_counter()
    with plain_process(setup) as process:
        process.complete("Hello", 8)
        return time.perf_counter() - started


def _sidecar_s(setup: Setup) -> float:
    """The same HOME in both calls: what the first one proves, the second one knows."""
    started = time.perf_counter()
    with starting_sidecar(setup) as port:
        _ask(port)
        seconds = time.perf_counter() - started
        _wait_proved(port)
    return seconds


def _ask(port: int) -> None:
    """Ask as soon as the port is open; the request waits for the model."""
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)
        try:
            body, kind = json.dumps(_ASKED), {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, kind)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise ChildProcessError(answer.read().decode(errors="replace"))
            answer.read()
            return
        except ConnectionError:
            time.sleep(0.005)
        finally:
            connection.close()
    raise TimeoutError(f"no answer within {_DEADLINE_S:g} seconds")


def _wait_proved(port: int) -> None:
    """Until no way of reuse waits for its proof any more."""
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/admin/cache")
        told = connection.getresponse().read()
        connection.close()
        if b'"pending"' not in told:
            return
        time.sleep(0.2)
    raise TimeoutError(f"not proved within {_DEADLINE_S:g} seconds")
