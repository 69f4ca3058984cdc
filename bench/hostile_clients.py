"""
Hostile clients, as a process of their own: what they cost is not the good clients'.

    python -m bench.hostile_clients --seconds 60 PROXY_PORT SIDECAR_PORT MODEL

Eight threads, each with one attack after the other, of random kinds, on either port.
Prints what came of them as JSON. Without --seconds each kind once or more on each port.
With --ordinary they do no harm: as many clients, who ask LiteLLM for short streams.
"""

import argparse
import contextlib
import json
import queue
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from bench.hostile_inputs import KINDS, ROUTES, Attack, Kind, Target, good_body, request

NUM_CLIENTS = 8
_SILENCE_S = 60.0
_PAUSE_S = 0.1  # on average, between two attacks of a client
_MAX_READ = 4 << 20
_SHOWN = 600
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
# Events of a stream end so; LiteLLM's and the sidecar's alike.
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_HONEST = (501, 503, 504)  # not built, busy or away, too late


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer that no input may bring about, by the system's monotonic clock."""

    kind: str
    port: int
    outcome: str
    sent: str
    answer: str
    started: float
    ended: float


def ordinary(target: Target, chance: random.Random) -> Attack:
    """No attack at all: a short stream of what nobody asked before, read to its end."""
    path = chance.choice(ROUTES)
    said = f"Matter {chance.randrange(10**9)}. " + "well " * chance.randrange(40)
    return Attack(request(target, path, good_body(target, path, said, stream=True)))


class HostileClients:
    """The clients, and what came of their attacks."""

    def __init__(
        self, targets: Sequence[Target], seed: str, kinds: dict[Kind, float] = KINDS
    ) -> None:
        self._targets = targets
        self._kinds = kinds
        self._seed = seed
        self._lock = threading.Lock()
        self.outcomes: dict[str, Counter[str]] = {}
        self.slowest: dict[str, float] = {}
        self.findings: list[Finding] = []

    def run(self, seconds: float) -> None:
        """All clients at once, for so long."""
        until = time.monotonic() + seconds

        def attack(chance: random.Random) -> None:
            while time.monotonic() < until:
                (kind,) = chance.choices(list(self._kinds), list(self._kinds.values()))
                self._attack(kind, chance.choice(self._targets), chance)
                time.sleep(chance.uniform(0, 2 * _PAUSE_S))

        self._start(attack)

    def run_each(self, times: int) -> None:
        """Each kind so often on each port, by all clients together."""
        work: queue.SimpleQueue[tuple[Kind, Target]] = queue.SimpleQueue()
        for kind in list(self._kinds) * times:
            for target in self._targets:
                work.put((kind, target))

        def attack(chance: random.Random) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._attack(*work.get_nowait(), chance)

        self._start(attack)

    def _start(self, attack: Callable[[random.Random], None]) -> None:
        chances = [random.Random(f"{self._seed}/{n}") for n in range(NUM_CLIENTS)]
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            list(threads.map(attack, chances))

    def _attack(self, kind: Kind, target: Target, chance: random.Random) -> None:
        attack, started = kind(target, chance), time.monotonic()
        answer = b""
        try:
            answer = _perform(attack, target.port)
            outcome = _outcome(attack, answer)
        except TimeoutError:
            outcome = f"silent for {_SILENCE_S:g} s"
        except ConnectionRefusedError:
            outcome = "nobody listens"
        except OSError:
            outcome = "closed"
        name, ended = kind.__name__, time.monotonic()
        with self._lock:
            if attack.way == "ask":
                self.slowest[name] = max(self.slowest.get(name, 0), ended - started)
            self.outcomes.setdefault(name, Counter())[outcome] += 1
            if _is_fault(outcome):
                shown = answer[:_SHOWN].decode(errors="replace")
                self.findings.append(
                    Finding(
                        name, target.port, outcome, attack.shown(), shown, started,
                        ended,
                    )
                )  # fmt: skip


def _is_fault(outcome: str) -> bool:
    is_failure = outcome.startswith("5") and int(outcome) not in _HONEST
    return is_failure or outcome.startswith("silent")


def _outcome(attack: Attack, answer: bytes) -> str:
    if attack.way in ("hold", "crowd"):
        return "left"
    found = _STATUS.match(answer)
    if found is None:
        return "left" if attack.way == "leave" and not answer else "closed"
    return found[1].decode()


def _perform(attack: Attack, port: int) -> bytes:
    if attack.way == "crowd":
        with contextlib.ExitStack() as opened:
            for _ in range(attack.num_events):
                opened.enter_context(_connection(port))
            time.sleep(attack.hold_s)
        return b""
    with _connection(port) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer before the end
            for piece in attack.pieces:
                connection.sendall(piece)
        if attack.way == "hold" or attack.way == "leave" and not attack.num_events:
            time.sleep(attack.hold_s)
            return b""
        return _read(connection, attack.num_events)


def _read(connection: socket.socket, num_events: int) -> bytes:
    """To the end, or to so many events behind the head."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            data += piece[: max(0, _MAX_READ - len(data))]
            if num_events and len(_EVENT_END.findall(data)) > num_events:
                break
    return bytes(data)


@contextlib.contextmanager
def _connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), _SILENCE_S) as connection:
        yield connection


def main(argv: list[str] | None = None) -> int:
    """Attack, then print."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile_clients")
    parser.add_argument("proxy_port", type=int)
    parser.add_argument("sidecar_port", type=int)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--ordinary", action="store_true")
    options = parser.parse_args(argv)
    proxy = Target(options.proxy_port, options.model)
    sidecar = Target(options.sidecar_port, options.model)
    if options.ordinary:
        clients = HostileClients([proxy], options.seed, {ordinary: 1.0})
    else:
        clients = HostileClients([proxy, sidecar], options.seed)
    if options.seconds:
        clients.run(options.seconds)
    else:
        clients.run_each(options.times)
    found = [asdict(finding) for finding in clients.findings]
    told = {"outcomes": clients.outcomes, "slowest": clients.slowest, "findings": found}
    json.dump(told, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
