"""What is written to a connection arrives whole, however slowly it is read."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from sidecar.server.connection import EagerWriter


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection with small buffers; the first has a deadline."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ours.settimeout(30)
    theirs.settimeout(30)
    with ours, theirs:
        yield ours, theirs


def read_whole(end: socket.socket, into: list[bytes]) -> None:
    while piece := end.recv(random.Random(len(into)).randint(1, 5000)):
        into.append(piece)


def test_a_slow_reader_gets_every_byte_once(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Only a part of a large write is taken at once."""
    ours, theirs = ends
    data = random.Random(1).randbytes(2_000_000)
    pieces: list[bytes] = []
    reader = threading.Thread(target=read_whole, args=(theirs, pieces))
    reader.start()
    writer = EagerWriter(ours)
    assert writer.write(data[:1_500_000]) == 1_500_000
    with writer.joined():
        writer.write(data[1_500_000:1_500_100])
        writer.write(data[1_500_100:])
    ours.close()
    reader.join(60)
    assert b"".join(pieces) == data


def test_what_is_joined_is_one_piece_or_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    writer = EagerWriter(ours)
    with contextlib.suppress(KeyError), writer.joined():
        writer.write(b"lost")
        raise KeyError
    with writer.joined():
        writer.write(b"head ")
        writer.write(b"body")
    assert theirs.recv(100) == b"head body"


def test_a_reader_that_stands_still_ends_at_the_deadline(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, _theirs = ends
    ours.settimeout(0.2)
    with pytest.raises(TimeoutError):
        EagerWriter(ours).write(b"x" * 4_000_000)
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        EagerWriter(ours).write(b"x")
