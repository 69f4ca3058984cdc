"""A small stand-in for the model hub: one repository, the calls a download makes."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CHUNK = 1 << 16


@dataclass
class Line:
    """How the hub sends weights; may be changed while it runs."""

    holds_after: int | None = None  # bytes of a body; then it waits for `go`
    go: threading.Event = field(default_factory=threading.Event)
    breaks_after: int | None = None  # bytes of a body; then the connection ends
    has_ranges: bool = True  # else all of a file is sent, whatever was asked
    status: int | None = None  # instead of the weights
    damaged: int = 0  # so many bodies of weights have one wrong byte
    is_git: bool = False  # names files as git does, by SHA-1; else by SHA-256
    elsewhere: bool = False  # weights lie on another host, as a store of blobs has it
    claimed: dict[str, int] = field(default_factory=dict)  # sizes that are not true
    etag: str | None = None  # of each file, in place of its digest
    list_body: bytes | None = None  # what it answers when it is searched
    list_holds: bool = False  # it never answers then


@dataclass
class Hub:
    """
    A running stand-in.

    `listed` are ids that it names when it is searched; only `repository` can be had.
    `requests` are all it was asked, `fetched` the files that were sent, `starts` where
    each sending of a file began, `tokens` what each path was asked with.
    """

    repository: str
    files: Mapping[str, bytes]
    url: str = ""
    line: Line = field(default_factory=Line)
    listed: tuple[str, ...] = ()
    requests: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    starts: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, set[str | None]] = field(default_factory=dict)

    def environment(self, home: str) -> dict[str, str]:
        """What points huggingface_hub here, with its cache under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": home,
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def size(self, name: str) -> int:
        return self.line.claimed.get(name, len(self.files[name]))


@contextlib.contextmanager
def running_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serve one repository's files on a free port."""

    class Handler(_Handler):
        hub = Hub(repository, files)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    Handler.hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield Handler.hub
    finally:
        Handler.hub.line.go.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        path, _, query = self.path.partition("?")
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.setdefault(path, set()).add(self.headers.get("Authorization"))
        prefix = f"/{hub.repository}/resolve/"
        if path in (
            f"/api/models/{hub.repository}",
            f"/api/models/{hub.repository}/revision/main",
            f"/api/models/{hub.repository}/revision/{COMMIT}",
        ):
            siblings = [{"rfilename": n, "size": hub.size(n)} for n in hub.files]
            body = {"id": hub.repository, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(body).encode(), {})
        elif path == f"/api/models/{hub.repository}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": hub.size(name), "oid": COMMIT}
                for name in hub.files
            ]
            self._send(200, json.dumps(tree).encode(), {})
        elif path == "/api/models" and hub.line.list_holds:
            hub.line.go.wait(60)
        elif path == "/api/models" and hub.line.list_body is not None:
            self._send(200, hub.line.list_body, {})
        elif path == "/api/models":
            found = [{"id": name} for name in self._searched(parse_qs(query))]
            self._send(200, json.dumps(found).encode(), {})
        elif path.startswith("/elsewhere/"):
            self._file(path.removeprefix("/elsewhere/"))
        elif (
            path.startswith(prefix) and hub.line.elsewhere and path.endswith("tensors")
        ):
            self._redirect(path.rpartition("/")[2])
        elif path.startswith(prefix):
            self._file(path.removeprefix(prefix).partition("/")[2])
        else:
            missing = {"X-Error-Code": "RepoNotFound"}
            self._send(404, b'{"error": "Repository not found"}', missing)

    def _searched(self, asked: Mapping[str, list[str]]) -> list[str]:
        """As the hub does it: the words are anywhere in an id, however written."""
        author, words = asked.get("author", [""])[0], asked.get("search", [""])[0]
        return [
            name
            for name in (self.hub.repository, *self.hub.listed)
            if name.startswith(f"{author}/" if author else "")
            and words.lower() in name.lower()
        ]

    def _redirect(self, name: str) -> None:
        data = self.hub.files[name]
        port = self.hub.url.rpartition(":")[2]
        headers = {
            "Location": f"http://localhost:{port}/elsewhere/{name}",
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": self._etag(data),
            "X-Linked-Size": str(self.hub.size(name)),
        }
        self._send(302, b"", headers)

    def _etag(self, data: bytes) -> str:
        if self.hub.line.etag is not None:
            return f'"{self.hub.line.etag}"'
        if self.hub.line.is_git:
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        else:
            digest = hashlib.sha256(data).hexdigest()
        return f'"{digest}"'

    def _file(self, name: str) -> None:
        hub, data = self.hub, self.hub.files[name]
        line = hub.line
        headers = {"X-Repo-Commit": COMMIT, "ETag": self._etag(data)}
        if self.command == "HEAD":
            self._send(200, b"", {**headers, "Content-Length": str(hub.size(name))})
            return
        is_weights = name.endswith(".safetensors")
        if line.status is not None and is_weights:
            self._send(line.status, b"{}", {})
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and line.has_ranges else 0
        hub.fetched.append(name)
        hub.starts.setdefault(name, []).append(start)
        if asked and line.has_ranges:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if line.damaged and is_weights:
            line.damaged -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        status = 206 if asked and line.has_ranges else 200
        self._send(status, data[start:], headers, is_weights=is_weights)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        *,
        is_weights: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(ConnectionError):
            if is_weights:
                self._send_slowly(body)
            else:
                self.wfile.write(body)

    def _send_slowly(self, body: bytes) -> None:
        line, sent = self.hub.line, 0
        while sent < len(body):
            if line.holds_after is not None and sent >= line.holds_after:
                line.go.wait(60)
            if line.breaks_after is not None and sent >= line.breaks_after:
                self.close_connection = True
                return
            sent += self.wfile.write(body[sent : sent + _CHUNK])

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
