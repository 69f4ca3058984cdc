"""Who gets a place when all are taken: those that ask, and above all health."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.server.listener import RESERVED, Places
from testkit.raw_http import CLOSED, connect, eventually, exchange, request
from testkit.servers import held_gpu, running_sidecar

CHAT = "/v1/chat/completions"
MOST = 4


@pytest.fixture
def sockets() -> Iterator[Callable[[], socket.socket]]:
    """Makes connected sockets; all are closed at the end."""
    with contextlib.ExitStack() as opened:

        def make() -> socket.socket:
            ours, theirs = socket.socketpair()
            opened.enter_context(ours)
            opened.enter_context(theirs)
            return ours

        yield make


Sockets = Callable[[], socket.socket]


def is_shut(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_one_that_is_idle_longest_makes_room(sockets: Sockets) -> None:
    """An answered request counts as a new wait."""
    places = Places(2, 0)
    first, second, third = (sockets() for _ in range(3))
    assert places.enter(first)
    assert places.enter(second)
    places.hear(first)
    assert places.begin(first, is_urgent=False)
    places.end(first)
    assert places.enter(third)
    assert [is_shut(one) for one in (first, second, third)] == [False, True, False]
    with pytest.raises(ConnectionResetError):
        places.begin(second, is_urgent=False)
    places.leave(second)
    assert places.num_taken == 2


def test_a_crowd_does_not_drive_out_who_is_asking_something(sockets: Sockets) -> None:
    """Not while the request is read, nor while it waits to be read."""
    places, early, crowd = Places(3, 0), sockets(), [sockets() for _ in range(5)]
    sender, peer = socket.socketpair()
    with sender, peer:
        assert places.enter(early)
        places.hear(early)
        assert places.enter(sender)
        peer.sendall(b"GET")
        for one in crowd:
            assert places.enter(one)
        assert [is_shut(one) for one in crowd] == [True] * 4 + [False]
        assert sender.recv(3) == b"GET"
        for one in (early, sender):
            assert places.begin(one, is_urgent=False)
            places.leave(one)


def test_of_those_that_send_halves_the_first_makes_room(sockets: Sockets) -> None:
    """When nobody is idle."""
    places, half = Places(2, 0), [sockets() for _ in range(3)]
    for one in half:
        assert places.enter(one)
        places.hear(one)
    assert [is_shut(one) for one in half] == [True, False, False]
    places.end(half[1])  # refused before it was whole
    assert places.enter(sockets())
    assert [is_shut(one) for one in half] == [True, True, False]


def test_places_are_kept_for_what_is_urgent(sockets: Sockets) -> None:
    """Of those that all ask, no more than the usual number do so at once."""
    places, asking = Places(2, 1), [sockets() for _ in range(3)]
    for one in asking[:2]:
        assert places.enter(one)
        assert places.begin(one, is_urgent=False)
    assert places.enter(asking[2])
    assert not places.begin(asking[2], is_urgent=False)
    assert places.begin(asking[2], is_urgent=True)
    assert not places.enter(sockets()), "all ask"
    places.leave(asking[0])
    assert places.enter(sockets())


@pytest.fixture(scope="module")
def small(model_folder: Callable[[str], Path]) -> Iterator[App]:
    """A sidecar with four places."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "MAX_CONNECTIONS": str(MOST),
        "TIMEOUT_CHAT_SECONDS": "600",
    }
    with running_sidecar(settings) as app:
        yield app


def test_idle_connections_shut_nobody_out(small: App) -> None:
    """Nor do those that send half a head, or half a body."""
    port = small.listener.port
    halves = (b"", b"POST /v1", request(CHAT, b"{}")[:-1], request("/health")[:-2])
    with contextlib.ExitStack() as opened:
        for number in range(10 * MOST):
            connection = opened.enter_context(connect(port))
            connection.sendall(halves[number % len(halves)])
        assert exchange(port, request("/health")).status == 200
        assert exchange(port, request("/v1/models")).status == 200
        assert small.listener.places.num_taken <= MOST + RESERVED
    assert eventually(lambda: small.listener.places.num_taken == 0)


def test_health_answers_however_many_ask(small: App) -> None:
    """The fifth chat is told to come back; health, metrics and admin are served."""
    port, places = small.listener.port, small.listener.places
    said = {"role": "user", "content": "x"}
    body = json.dumps({"messages": [said], "max_tokens": 1}).encode()
    with held_gpu(small) as go:
        asking = [
            threading.Thread(target=exchange, args=(port, request(CHAT, body)))
            for _ in range(MOST)
        ]
        for one in asking:
            one.start()
        assert eventually(lambda: len(places._asking) == MOST)
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
    asking = [socket.socket() for _ in range(MOST + RESERVED)]
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
