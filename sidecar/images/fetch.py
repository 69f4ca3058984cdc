"""
Fetches images by URL: redirects, sizes and deadlines; addresses.py says from where.

A name is resolved once, every address of it is checked, and the connection goes to a
checked one: what the DNS says next changes nothing. Each redirect starts over. A thread
beside the fetch shuts its socket when time is up or the client is gone, however slowly
the other side sends.
"""

import http.client
import math
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from sidecar.core.errors import ImageFetchFailed, RequestCancelled
from sidecar.images.addresses import is_public
from sidecar.images.freshness import fresh_s
from sidecar.infra.lru import Lru

_CONNECT_S = 5.0
_IN_ALL_S = 30.0
_LOOK_S = 0.2  # between two looks whether it is still wanted
_MAX_ADDRESSES = 3
_MAX_REDIRECTS = 3
_MAX_URL_CHARS = 8192
_CACHE_BYTES = 64 << 20
_PORTS = {"http": 80, "https": 443}
_MOVED = (301, 302, 303, 307, 308)
_SAFE = "/%:=&?~#+!$,;'@()*[]-._"
# One word for all that lies inside, is unknown or does not answer.
_NOT_HAD = "could not be fetched: it is not a public address, or gives no image"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """
    What may be fetched.

    Args:
        max_bytes: of an image, encoded. cache_s: for how long at most a URL stands for
            the bytes that it gave first. allow_private: take any address.
    """

    max_bytes: int
    cache_s: float
    allow_private: bool = False


@dataclass(frozen=True, slots=True)
class _Fetched:
    """
    What a URL gave.

    Args:
        moved: where the image is instead; None: here. fresh_s: see freshness.
    """

    data: bytes
    fresh_s: float
    moved: str | None = None


class ImageFetcher:
    """Gets images from http(s) URLs, on the caller's thread. Any thread."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._known: Lru[tuple[str, str], tuple[float, bytes]] = Lru(
            4096, _CACHE_BYTES, lambda url, found: len(found[1])
        )

    def forget(self) -> None:
        """Know no URL any more."""
        self._known.clear()

    def drop(self, url: str, salt: str) -> None:
        """Fetch a URL anew when it is asked for again."""
        self._known.pop((salt, url))

    def fetch(
        self, url: str, salt: str, path: str, is_wanted: Callable[[], bool]
    ) -> bytes:
        """
        The bytes behind a URL.

        Args:
            salt: what was fetched under another one is fetched again.
            path: the request's field, for messages. is_wanted: asked while it comes.
        Raises:
            ImageFetchFailed: it cannot be had; nothing is said of who answered inside.
            RequestCancelled: the client is gone.
        """
        known = self._known.get((salt, url))
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        since = self._known.num_clears
        found = _Errand(self._limits, path, is_wanted).run(url)
        if (fresh := min(found.fresh_s, self._limits.cache_s)) > 0:
            until = time.monotonic() + fresh
            self._known.put((salt, url), (until, found.data), since)
        return found.data


class _Errand:
    """One fetch, with its deadline."""

    def __init__(
        self, limits: FetchLimits, path: str, is_wanted: Callable[[], bool]
    ) -> None:
        self._limits = limits
        self._path = path
        self._is_wanted = is_wanted
        self._deadline = time.monotonic() + _IN_ALL_S

    def run(self, url: str) -> _Fetched:
        fresh = math.inf  # as the shortest of the way there
        for _ in range(_MAX_REDIRECTS + 1):
            found = self._get(url)
            fresh = min(fresh, found.fresh_s)
            if found.moved is None:
                return replace(found, fresh_s=fresh)
            url = urljoin(url, found.moved)
        raise self._failed("redirects too often")

    def _get(self, url: str) -> _Fetched:
        """The image, or where it has moved."""
        parts, host, addresses = self._checked(url)
        for address in addresses[:_MAX_ADDRESSES]:
            try:
                return self._ask(parts, host, address)
            # What a URL or a server can bring about: all of it is the client's.
            except (OSError, http.client.HTTPException, ValueError):
                self._require_time()
        raise self._failed(_NOT_HAD)

    def _checked(self, url: str) -> tuple[SplitResult, str, list[str]]:
        """A URL that may be asked, its host in ASCII, and the addresses to ask."""
        if len(url) > _MAX_URL_CHARS:
            raise self._failed(f"has a URL of more than {_MAX_URL_CHARS} characters")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        except ValueError:
            raise self._failed("is no URL") from None
        if parts.scheme not in _PORTS or not host:
            raise self._failed("must be an http or https URL")
        if parts.username is not None or parts.password is not None:
            raise self._failed("must not hold credentials")
        addresses = self._resolve(host, port or _PORTS[parts.scheme])
        if not self._limits.allow_private and not all(map(is_public, addresses)):
            raise self._failed(_NOT_HAD)
        return parts, host, addresses

    def _resolve(self, host: str, port: int) -> list[str]:
        """All addresses of a name; the system's resolver knows no deadline."""
        answers: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

        def look_up() -> None:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                answers.put([str(entry[4][0]) for entry in found])
            except (OSError, ValueError):
                answers.put([])

        threading.Thread(target=look_up, name="image-dns", daemon=True).start()
        try:
            addresses = answers.get(timeout=max(0.0, self._left_s()))
        except queue.Empty:
            addresses = []
        if not addresses:
            raise self._failed(_NOT_HAD)
        return addresses

    def _ask(self, parts: SplitResult, host: str, address: str) -> _Fetched:
        port = parts.port or _PORTS[parts.scheme]
        named = f"[{host}]" if ":" in host else host
        target = quote(parts.path or "/", safe=_SAFE)
        if parts.query:
            target += "?" + quote(parts.query, safe=_SAFE)
        shown = named if parts.port is None else f"{named}:{port}"
        headers = {"Host": shown, "Accept": "image/*", "Connection": "close"}
        connection = http.client.HTTPConnection(host, port)
        with (
            closing(connection),
            self._guarded(
                socket.create_connection((address, port), _CONNECT_S)
            ) as sock,
        ):
            if parts.scheme == "https":
                sock = ssl.create_default_context().wrap_socket(
                    sock, server_hostname=host
                )
            connection.sock = sock
            connection.request("GET", target, headers=headers)
            with closing(connection.getresponse()) as answer:
                fresh = fresh_s(answer.headers)
                if answer.status in _MOVED and (moved := answer.getheader("location")):
                    return _Fetched(b"", fresh, moved)
                if answer.status != http.client.OK:
                    raise self._failed(_NOT_HAD)
                return _Fetched(self._read(answer), fresh)

    @contextmanager
    def _guarded(self, sock: socket.socket) -> Iterator[socket.socket]:
        """Shut the socket from outside when it is not to be waited for any more."""
        is_over, line = threading.Event(), socket.socket(fileno=os.dup(sock.fileno()))

        def watch() -> None:
            while not is_over.wait(_LOOK_S):
                if self._left_s() <= 0 or not self._is_wanted():
                    with suppress(OSError):
                        line.shutdown(socket.SHUT_RDWR)
                    return

        watcher = threading.Thread(target=watch, name="image-fetch", daemon=True)
        watcher.start()
        try:
            yield sock
        finally:
            is_over.set()
            watcher.join(1)
            line.close()
            sock.close()

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        data = bytearray()
        while piece := answer.read1(65536):
            data += piece
            if len(data) > self._limits.max_bytes:
                raise self._failed(f"is larger than {self._limits.max_bytes >> 20} MB")
        self._require_time()  # else it was the watch that ended it
        if answer.length:  # `read1` tells nobody that so many bytes did not come
            raise http.client.IncompleteRead(bytes(data), answer.length)
        return bytes(data)

    def _require_time(self) -> None:
        if not self._is_wanted():
            raise RequestCancelled("the client closed the connection")
        if self._left_s() <= 0:
            raise self._failed(f"took longer than {_IN_ALL_S:g} s")

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _failed(self, why: str) -> ImageFetchFailed:
        return ImageFetchFailed(f"{self._path}: the image {why}", param=self._path)
