"""Who gets a place when all are taken: those that ask, and above all health."""

import contextlib
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sidecar.app import App
from sidecar.server import turned_away
from sidecar.server.listener import RESERVED, ConnectionLimiter
from sidecar.server.turned_away import TurnedAway
from testkit.raw_http import (
    CLOSED,
    connect,
    eventually,
    exchange,
    read_answer,
    request,
)
from testkit.servers import held_gpu, running_sidecar

CHAT = "/v1/chat/completions"
MAX = 4


class Line:
    """A connection of the server's, and its client's end."""

    def __init__(self) -> None:
        self.ours, self.client = socket.socketpair()

    def told(self) -> int | None:
        """The status that its client was sent; None: nothing, and it is open."""
        self.client.setblocking(False)
        try:
            data = self.client.recv(1 << 16)
        except BlockingIOError:
            return None
        return read_answer(io.BytesIO(data)).status

    def close(self) -> None:
        self.ours.close()
        self.client.close()


@pytest.fixture
def lines() -> Iterator[Callable[[], Line]]:
    """Makes connected sockets; all are closed at the end."""
    with contextlib.ExitStack() as opened:

        def make() -> Line:
            line = Line()
            opened.callback(line.close)
            return line

        yield make


Lines = Callable[[], Line]


def test_the_one_that_is_idle_longest_makes_room(lines: Lines) -> None:
    """An answered request counts as a new wait; who has to go is told."""
    places = ConnectionLimiter(2, 0)
    first, second, third = (lines() for _ in range(3))
    assert places.enter(first.ours)
    assert places.enter(second.ours)
    places.hear(first.ours)
    assert places.begin(first.ours, is_urgent=False)
    places.end(first.ours)
    assert places.enter(third.ours)
    assert [one.told() for one in (first, second, third)] == [None, 503, None]
    with pytest.raises(ConnectionResetError):
        places.begin(second.ours, is_urgent=False)
    assert not places.refuse(second.ours), "it was told already"
    places.leave(second.ours)
    assert places.num_taken == 2


def test_a_crowd_does_not_drive_out_who_is_asking_something(lines: Lines) -> None:
    """Not while the request is read, nor while it waits to be read."""
    places, early, crowd = ConnectionLimiter(3, 0), lines(), [lines() for _ in range(5)]
    sender = lines()
    assert places.enter(early.ours)
    places.hear(early.ours)
    assert places.enter(sender.ours)
    sender.client.sendall(b"GET")
    for one in crowd:
        assert places.enter(one.ours)
    assert [one.told() for one in crowd] == [503] * 4 + [None]
    assert sender.ours.recv(3) == b"GET"
    for one in (early, sender):
        assert places.begin(one.ours, is_urgent=False)
        places.leave(one.ours)


def test_of_those_that_send_halves_the_first_makes_room(lines: Lines) -> None:
    """When nobody is idle."""
    places, half = ConnectionLimiter(2, 0), [lines() for _ in range(3)]
    for one in half:
        assert places.enter(one.ours)
        places.hear(one.ours)
    assert [one.told() for one in half] == [503, None, None]
    places.end(half[1].ours)  # refused before it was whole
    assert places.enter(lines().ours)
    assert half[1].told() == 503
    assert half[2].told() is None


def test_places_are_kept_for_what_is_urgent(lines: Lines) -> None:
    """Of those that all ask, no more than the usual number do so at once."""
    places, asking = ConnectionLimiter(2, 1), [lines() for _ in range(3)]
    for one in asking[:2]:
        assert places.enter(one.ours)
        assert places.begin(one.ours, is_urgent=False)
    assert places.enter(asking[2].ours)
    assert not places.begin(asking[2].ours, is_urgent=False)
    assert places.begin(asking[2].ours, is_urgent=True)
    late = lines()
    assert not places.enter(late.ours), "all ask"
    assert late.told() == 503
    places.leave(asking[0].ours)
    assert places.enter(lines().ours)


def test_those_turned_away_are_bounded(lines: Lines) -> None:
    """However many come, and whether a thread reads from them."""
    turned_away, told = TurnedAway(2), [lines() for _ in range(4)]
    for number, one in enumerate(told):
        turned_away.tell(one.ours, has_thread=number % 2 == 0)
    assert [one.told() for one in told] == [503] * 4
    assert told[0].ours.recv(1) == b"", "its thread is not woken"
    assert told[1].ours.fileno() == -1, "it is not closed"
    told[3].client.sendall(b"its request")
    turned_away.look()
    assert told[3].ours.fileno() != -1, "a reset could reach its client first"
    told[3].client.close()
    turned_away.look()
    assert told[3].ours.fileno() == -1
    turned_away.close()


@pytest.fixture(scope="module")
def small(model_folder: Callable[[str], Path]) -> Iterator[App]:
    """A sidecar with four places."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "MAX_CONNECTIONS": str(MAX),
        "TIMEOUT_CHAT_SECONDS": "600",
    }
    with running_sidecar(settings) as app:
        yield app


def test_idle_connections_shut_nobody_out(small: App) -> None:
    """Nor do those that send half a head, or half a body."""
    port = small.listener.port
    halves = (b"", b"POST /v1", request(CHAT, b"{}")[:-1], request("/health")[:-2])
    with contextlib.ExitStack() as opened:
        for number in range(10 * MAX):
            connection = opened.enter_context(connect(port))
            connection.sendall(halves[number % len(halves)])
        assert exchange(port, request("/health")).status == 200
        assert exchange(port, request("/v1/models")).status == 200
        assert small.listener.places.num_taken <= MAX + RESERVED
    assert eventually(lambda: small.listener.places.num_taken == 0)


def test_health_answers_however_many_ask(small: App) -> None:
    """The fifth chat is told to come back; health, metrics and admin are served."""
    port, places = small.listener.port, small.listener.places
    said = {"role": "user", "content": "x"}
    body = json.dumps({"messages": [said], "max_tokens": 1}).encode()
    with held_gpu(small) as go:
        asking = [
            threading.Thread(target=exchange, args=(port, request(CHAT, body)))
            for _ in range(MAX)
        ]
        for one in asking:
            one.start()
        assert eventually(lambda: len(places._asking) == MAX)
        for path in ("/health", "/metrics", "/admin/cache"):
            assert exchange(port, request(path)).status == 200
        refused = exchange(port, request(CHAT, body))
        assert (refused.status, refused.header("retry-after")) == (503, "1")
        with contextlib.ExitStack() as opened:
            for _ in range(3 * RESERVED):
                opened.enter_context(connect(port))
            assert exchange(port, request("/health")).status == 200
        go.set()
        for one in asking:
            one.join(120)
    assert eventually(lambda: places.num_taken == 0)


def test_a_connection_too_many_is_turned_away(small: App) -> None:
    """When none of them waits, not even on the places that are kept."""
    places = small.listener.places
    asking = [socket.socket() for _ in range(MAX + RESERVED)]
    for one in asking:
        assert places.enter(one)
        assert places.begin(one, is_urgent=True)
    turned_away = exchange(small.listener.port, b"")
    assert turned_away != CLOSED
    assert (turned_away.status, turned_away.header("retry-after")) == (503, "1")
    assert turned_away.json["error"]["message"] == "too many connections"
    for one in asking:
        places.leave(one)
        one.close()


def test_whoever_asks_gets_a_status(
    small: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty connect, then ask, at four places: 52 of 200 were cut without a word."""
    monkeypatch.setattr(turned_away, "_LINGER_S", 60.0)
    monkeypatch.setattr(small.listener.places.turned_away, "_max", 50)
    said = {"role": "user", "content": "x"}
    body = json.dumps({"messages": [said], "max_tokens": 1}).encode()
    with contextlib.ExitStack() as opened:
        port = small.listener.port
        crowd = [opened.enter_context(connect(port)) for _ in range(50)]
        for one in crowd:
            one.sendall(request(CHAT, body, ("Connection: close",)))
        streams = [opened.enter_context(one.makefile("rb")) for one in crowd]
        answers = [read_answer(stream) for stream in streams]
    assert {answer.status for answer in answers} <= {200, 429, 503}
    refused = [answer for answer in answers if answer.status != 200]
    assert len(refused) < 50
    assert all(answer.header("retry-after") for answer in refused)
    assert eventually(lambda: small.listener.places.num_taken == 0)


def test_listing_the_models_is_no_work() -> None:
    """LiteLLM does so every few seconds; freed memory goes back meanwhile."""
    with running_sidecar() as app:
        before = app.listener.places.work
        for _ in range(3):
            assert httpx.get(f"{app.url}/v1/models", timeout=60).status_code == 200
        assert app.listener.places.work == before
