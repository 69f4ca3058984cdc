"""The tools' way to a server: whom the key of the environment goes to."""

import argparse
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sidecar.__main__ import main
from sidecar.cli.server import ServerError, add_server_flags, server_of


class _Door(ThreadingHTTPServer):
    """Keeps the keys that it is shown; sends on, if it is given where."""

    def __init__(self, to: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.to, self.keys = to, list[str | None]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Door

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self.send_response(302 if self.server.to else 200)
        if self.server.to:
            self.send_header("Location", self.server.to)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def door(to: str | None = None) -> Iterator[_Door]:
    with _Door(to) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


class _Stranger(BaseHTTPRequestHandler):
    """Whatever else listens there."""

    answer: tuple[int, str, bytes]

    def do_GET(self) -> None:
        status, kind, body = self.answer
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) + (kind == "broken")))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((404, "text/html;charset=utf-8", b"<!DOCTYPE HTML><html>"), "is no sidecar"),
        ((200, "text/html", b"<!DOCTYPE HTML><html>"), "is no sidecar"),
        ((200, "application/json", b"{"), "is no sidecar"),
        ((200, "broken", b"{"), "broke off"),
    ],
)
def test_what_is_no_sidecar_is_told_in_a_sentence(
    answer: tuple[int, str, bytes], why: str
) -> None:
    """Not by a page of HTML, nor by a traceback."""
    handler = type("Handler", (_Stranger,), {"answer": answer})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(ServerError) as caught:
                server_of(asked("--url", url)).get("/admin/state")
        finally:
            server.shutdown()
            thread.join(10)
    assert why in str(caught.value)
    assert "<" not in str(caught.value)


def test_an_answer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is for all of it, not for each piece."""
    monkeypatch.setattr("sidecar.cli.server._LOOK_S", 0.3)
    ended = threading.Event()

    class Trickling(_Stranger):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not ended.wait(0.02):
                    self.wfile.write(b" ")

    with ThreadingHTTPServer(("127.0.0.1", 0), Trickling) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(ServerError, match="no end within"):
                server_of(asked("--url", url)).get("/admin/state")
        finally:
            ended.set()
            server.shutdown()
            thread.join(10)


def asked(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_flags(parser, "ADMIN_TOKEN", "MLX_API_KEY")
    return parser.parse_args(flags)


def test_the_environments_key_is_for_its_own_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_API_KEY", "of-the-environment")
    with door() as own, door() as other:
        monkeypatch.setenv("MLX_PORT", str(own.server_port))
        server_of(asked()).get("/x")
        assert own.keys == ["Bearer of-the-environment"]
        server_of(asked("--url", other.url)).get("/x")
        server_of(asked("--url", other.url, "--key", "mine")).get("/x")
        assert other.keys == [None, "Bearer mine"]


def test_no_key_follows_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    with door() as stranger, door(f"http://localhost:{stranger.server_port}/") as own:
        server = server_of(asked("--url", own.url, "--key", "mine"))
        with pytest.raises(ServerError, match="302"):
            server.get("/x")
        assert stranger.keys == []


@pytest.mark.parametrize("key", ["schl\u00fcssel", "sek\nret", "\x00"])
def test_a_key_that_no_request_can_carry_is_not_printed(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "--key", key]) == 1
    said = capsys.readouterr().err
    assert (
        said == "mlx-sidecar list: the key has characters that no request can carry\n"
    )


def test_another_program_on_the_port_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with door() as other:
        assert main(["list", "--url", other.url]) == 1
    assert "not as a sidecar does" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::1", "http://[::1]:9"),
        ("[::1]", "http://[::1]:9"),
        ("::", "http://127.0.0.1:9"),
    ],
)
def test_the_environment_says_where(
    host: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_HOST", host)
    monkeypatch.setenv("MLX_PORT", "9")
    assert asked().url == url
