"""A small stand-in for the model hub: one repository, the calls a download makes."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A running stand-in; `fetched` lists the files that were downloaded."""

    def __init__(self, url: str, fetched: list[str]) -> None:
        self.url = url
        self.fetched = fetched


@contextlib.contextmanager
def running_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serve one repository's files on a free port."""

    class Handler(_Handler):
        name = repository
        content = files
        fetched: ClassVar[list[str]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", Handler.fetched)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name: str
    content: Mapping[str, bytes]
    fetched: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        prefix = f"/{self.name}/resolve/"
        if path.startswith(f"/api/models/{self.name}/revision/"):
            siblings = [{"rfilename": name} for name in self.content]
            body = {"id": self.name, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(body).encode(), {})
        elif path == f"/api/models/{self.name}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": COMMIT}
                for name, data in self.content.items()
            ]
            self._send(200, json.dumps(tree).encode(), {})
        elif path.startswith(prefix):
            self._file(path.removeprefix(prefix).partition("/")[2])
        else:
            missing = {"X-Error-Code": "RepoNotFound"}
            self._send(404, b'{"error": "Repository not found"}', missing)

    def _file(self, name: str) -> None:
        data = self.content[name]
        if self.command == "GET":
            self.fetched.append(name)
        digest = hashlib.sha256(data).hexdigest()
        self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
