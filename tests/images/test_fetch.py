"""
Fetching: no client looks into this machine's network by an image's URL (V10), and what
is fetched is bounded in bytes and time (V11). The web is a server on this machine.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from sidecar.core.errors import BadRequest, ImageFetchFailed, RequestCancelled
from sidecar.core.prompt import ProcessedImage
from sidecar.core.requests import Image as RequestImage
from sidecar.core.requests import Message
from sidecar.images import fetch as fetch_module
from sidecar.images.addresses import is_public
from sidecar.images.fetch import FetchLimits, ImageFetcher
from sidecar.images.reader import ImageIntake, ImageLimits, ImageReader
from testkit.pictures import encoded, picture

PLACE = "messages[0].content[0]"


class Web:
    """A web server: what it was asked, and how it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = {k.lower(): v for k, v in self.headers.items()}
                web.asked.append((self.path, headers))
                web.answers[self.path](self)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.port = self._server.server_port

    def url(self, path: str, host: str = "pictures.example") -> str:
        return f"http://{host}:{self.port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What the DNS answers to each question for a name, one after another."""
    known: dict[str, list[list[str]]] = {}

    def entry(address: str, port: int) -> Any:
        return socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)

    def look_up(host: str, port: int, *_: Any, **named: Any) -> list[Any]:
        if host not in known:
            return [entry(host, port)]
        answer = known[host].pop(0) if len(known[host]) > 1 else known[host][0]
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))
            for address in answer
        ]

    monkeypatch.setattr(fetch_module.socket, "getaddrinfo", look_up)
    return known


def sends(
    data: bytes, status: int = 200, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def fetched(
    url: str, *, private: bool = False, is_wanted: Callable[[], bool] = lambda: True
) -> bytes:
    limits = FetchLimits(1 << 20, 600, allow_private=private)
    return ImageFetcher(limits).fetch(url, "", PLACE, is_wanted)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1",
        "::1", "::", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1",
        "2002:7f00:1::", "fec0::1", "nonsense", "",
    ],
)  # fmt: skip
def test_addresses_inside_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "1.1.1.1", "2606:4700::1111"])
def test_those_of_the_internet_are(address: str) -> None:
    assert is_public(address)


def test_nothing_inside_is_asked(web: Web, names: dict[str, list[list[str]]]) -> None:
    """By address, by name, by one bad address of two; a listener counts nothing."""
    names["inside.example"] = [["127.0.0.1"]]
    names["mixed.example"] = [["93.184.216.34", "127.0.0.1"]]
    hosts = ["127.0.0.1", "localhost", "inside.example", "mixed.example", "[::1]"]
    names["localhost"] = [["127.0.0.1"]]
    for host in hosts:
        with pytest.raises(ImageFetchFailed, match="not a public address"):
            fetched(web.url("/a.png", host))
    assert web.asked == []


def test_a_redirect_inside_is_not_followed(
    web: Web, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address is let through, as if it were outside; the second is not."""
    seen = itertools.count()
    monkeypatch.setattr(fetch_module, "is_public", lambda address: next(seen) == 0)
    names["pictures.example"] = [["127.0.0.1"]]
    web.answers["/a"] = sends(b"", 302, location=web.url("/secret", "127.0.0.1"))
    with pytest.raises(ImageFetchFailed, match="not a public address"):
        fetched(web.url("/a"))
    assert [path for path, _ in web.asked] == ["/a"]


def test_the_connection_goes_to_the_address_that_was_checked(
    web: Web, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DNS that changes its answer is asked once; the name goes into the header."""
    checked: list[str] = []

    def note(address: str) -> bool:
        checked.append(address)
        return True

    monkeypatch.setattr(fetch_module, "is_public", note)
    names["pictures.example"] = [["127.0.0.1"], ["203.0.113.9"]]
    web.answers["/a"] = sends(b"the image")
    assert fetched(web.url("/a")) == b"the image"
    assert checked == ["127.0.0.1"]
    ((_, headers),) = web.asked
    assert headers["host"] == f"pictures.example:{web.port}"
    assert "cookie" not in headers
    assert "authorization" not in headers


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "http or https"),
        ("ftp://pictures.example/a", "http or https"),
        ("http://user:word@pictures.example/a", "credentials"),
        ("http://", "http or https"),
        ("http://[half", "no URL"),
    ],
)
def test_other_urls_are_refused(url: str, why: str) -> None:
    with pytest.raises(ImageFetchFailed, match=why) as refused:
        fetched(url)
    assert refused.value.param == PLACE


def test_no_proxy_of_the_environment_is_used(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    web.answers["/a"] = sends(b"seen")
    assert fetched(web.url("/a", "127.0.0.1"), private=True) == b"seen"


def test_bytes_are_counted_whatever_the_length_says(web: Web) -> None:
    web.answers["/large"] = sends(bytes(2 << 20))
    with pytest.raises(ImageFetchFailed, match="larger than 1 MB"):
        fetched(web.url("/large", "127.0.0.1"), private=True)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_error_tells_nothing_of_who_answered(web: Web, status: int) -> None:
    web.answers["/a"] = sends(b"the secret page of an inner machine", status)
    with pytest.raises(ImageFetchFailed) as refused:
        fetched(web.url("/a", "127.0.0.1"), private=True)
    assert refused.value.message.startswith(f"{PLACE}: the image could not be fetched")
    assert "secret" not in refused.value.message


def test_redirects_end(web: Web) -> None:
    web.answers["/a"] = sends(b"", 302, location="/a")
    with pytest.raises(ImageFetchFailed, match="redirects too often"):
        fetched(web.url("/a", "127.0.0.1"), private=True)
    assert len(web.asked) == 4


def test_a_trickle_ends_with_its_client_or_its_deadline(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not ended.wait(0.01):
            handler.wfile.write(b"x" * 1000)

    web.answers["/a"] = trickle
    url = web.url("/a", "127.0.0.1")
    try:
        wanted = iter([True] * 3)
        with pytest.raises(RequestCancelled):
            fetched(url, private=True, is_wanted=lambda: next(wanted, False))
        monkeypatch.setattr(fetch_module, "_IN_ALL_S", 0.2)
        with pytest.raises(ImageFetchFailed, match="took longer"):
            fetched(url, private=True)
    finally:
        ended.set()


def test_a_url_stands_for_its_first_bytes_for_a_while(web: Web) -> None:
    url = web.url("/a", "127.0.0.1")
    web.answers["/a"] = sends(b"first")
    fetcher = ImageFetcher(FetchLimits(1 << 20, 600, allow_private=True))

    def get(salt: str = "") -> bytes:
        return fetcher.fetch(url, salt, PLACE, lambda: True)

    assert get() == b"first"
    web.answers["/a"] = sends(b"second")
    assert get() == b"first"
    assert get("another key") == b"second"
    fetcher.forget()
    assert get() == b"second"


def cached_for(web: Web, asked_s: float = 600, **headers: str) -> float:
    """How long a URL stands for an image that came with such headers."""
    web.answers["/a"] = sends(b"an image", **headers)
    fetcher = ImageFetcher(FetchLimits(1 << 20, asked_s, allow_private=True))
    url, now = web.url("/a", "127.0.0.1"), time.monotonic()
    fetcher.fetch(url, "", PLACE, lambda: True)
    known = fetcher._known.get(("", url))
    return 0.0 if known is None else round(known[0] - now)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 600),
        ({"Cache_Control": "no-store"}, 0),
        ({"Cache_Control": 'public, No-Cache="set-cookie", max-age=60'}, 0),
        ({"Cache_Control": "max-age=60"}, 60),
        ({"Cache_Control": 'private, must-revalidate, max-age="60"'}, 60),
        ({"Cache_Control": "max-age=60", "Age": "45"}, 15),
        ({"Cache_Control": "max-age=60", "Age": "90"}, 0),
        ({"Cache_Control": "max-age=31536000"}, 600),
        ({"Cache_Control": "max-age=soon"}, 0),
        ({"Cache_Control": "max-age=60", "Expires": "0"}, 60),
        ({"Cache_Control": "must-revalidate"}, 600),
        ({"Expires": "0"}, 0),
        ({"Expires": formatdate(time.time() - 5, usegmt=True)}, 0),
        ({"Expires": formatdate(time.time() + 1e6, usegmt=True)}, 600),
    ],
)
def test_a_url_stands_for_its_image_as_long_as_headers_say(
    web: Web, headers: dict[str, str], seconds: float
) -> None:
    """And never longer than IMAGE_URL_CACHE_SECONDS."""
    assert abs(cached_for(web, **headers) - seconds) <= 1
    assert cached_for(web, 0, **headers) == 0


def test_what_must_not_be_stored_is_fetched_anew(web: Web) -> None:
    """Other bytes behind the same URL are seen at once, behind a redirect too."""
    fetcher = ImageFetcher(FetchLimits(1 << 20, 600, allow_private=True))
    web.answers["/a"] = sends(b"", 302, location="/b", Cache_Control="no-store")
    for number in range(3):
        web.answers["/b"] = sends(b"%d" % number)
        url = web.url("/a", "127.0.0.1")
        assert fetcher.fetch(url, "", PLACE, lambda: True) == b"%d" % number


@pytest.mark.parametrize("kind", ["length", "chunked"])
def test_what_is_cut_short_is_no_image(web: Web, kind: str) -> None:
    """Nor is it kept: the next request gets all of it."""

    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if kind == "length":
            handler.send_header("Content-Length", "1000")
        else:
            handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"3e8\r\n" * (kind == "chunked") + b"half")

    fetcher = ImageFetcher(FetchLimits(1 << 20, 600, allow_private=True))
    web.answers["/a"] = cut
    url = web.url("/a", "127.0.0.1")
    with pytest.raises(ImageFetchFailed):
        fetcher.fetch(url, "", PLACE, lambda: True)
    web.answers["/a"] = sends(b"all of it")
    assert fetcher.fetch(url, "", PLACE, lambda: True) == b"all of it"


class Processor:
    """Takes any picture for three pads."""

    def process(self, picture: Image.Image) -> ProcessedImage:
        return ProcessedImage((7, 9, 9, 9, 8), 9, {})


def test_what_is_no_image_is_not_kept(web: Web) -> None:
    """Half a PNG of no said length is refused, and fetched again when asked again."""
    fetch = FetchLimits(1 << 20, 600, allow_private=True)
    reader = ImageReader(
        ImageIntake(ImageLimits(1 << 20, 1 << 20, 4, fetch)), Processor()
    )
    image, url = encoded(picture(1)), web.url("/a", "127.0.0.1")
    asked = [Message("user", (RequestImage(url, path=PLACE),))]
    web.answers["/a"] = sends(image[:700])
    with pytest.raises(BadRequest, match="cannot be decoded"):
        reader.read(asked, "", lambda: True)
    web.answers["/a"] = sends(image)
    _, (seen,) = reader.read(asked, "", lambda: True)
    assert seen.size == (96, 64)


@pytest.mark.parametrize("where", ["body", "head", "nowhere"])
def test_a_byte_now_and_then_keeps_nobody(
    web: Web, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """However slowly it comes, or whatever never comes, the time is over in all."""
    ended = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        if where == "body":
            handler.send_response(200)
            handler.end_headers()
        elif where == "head":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not ended.wait(0.02):
            with contextlib.suppress(OSError):
                handler.wfile.write(b"x" if where != "nowhere" else b"")

    web.answers["/a"] = trickle
    url = web.url("/a", "127.0.0.1")
    try:
        monkeypatch.setattr(fetch_module, "_IN_ALL_S", 0.5)
        with pytest.raises(ImageFetchFailed, match="took longer"):
            fetched(url, private=True)
        monkeypatch.setattr(fetch_module, "_IN_ALL_S", 30.0)
        begun = itertools.count()
        with pytest.raises(RequestCancelled):
            fetched(url, private=True, is_wanted=lambda: next(begun) < 2)
    finally:
        ended.set()


@pytest.mark.parametrize(
    "url",
    [
        "http://\uff11\uff12\uff17.0.0.1/a",
        "http://b\u00fccher.example/\u00e4 b?q=\u20ac",
        "http://a.example/\x7f\x00", "http://a.example/\ud800", "http://a..b/",
        "http://" + "a" * 9000, "http://a.example:99999/", "http://[::1%25eth0]/",
    ],
)  # fmt: skip
def test_odd_urls_are_a_clients_fault(
    url: str, names: dict[str, list[list[str]]]
) -> None:
    names["a.example"] = names["xn--bcher-kva.example"] = [["127.0.0.1"]]
    with pytest.raises(ImageFetchFailed):
        fetched(url)


def test_what_moves_nowhere_is_a_clients_fault(web: Web) -> None:
    web.answers["/none"] = sends(b"", 302)
    web.answers["/data"] = sends(b"", 302, location="data:image/png;base64,aGk=")
    for path in ("/none", "/data"):
        with pytest.raises(ImageFetchFailed):
            fetched(web.url(path, "127.0.0.1"), private=True)
