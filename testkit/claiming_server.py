"""A server that answers every chat alike and claims what it likes about reuse."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
# (body of a request, its prompt's length in words) -> tokens claimed to be cached
Claim = Callable[[Json, int], int]


def everything(_body: Json, prompt_len: int) -> int:
    """All but the last token, always."""
    return prompt_len - 1


@contextlib.contextmanager
def claiming_server(
    claim: Claim, *, ends: bytes = b"data: [DONE]\n\n"
) -> Iterator[str]:
    """
    Its address. A token is a word.

    Args:
        ends: what stands behind the content; no usage comes if it is not [DONE].
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(b'{"data": [{"id": "claims", "supports_vision": true}]}')

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(size))
            length = sum(len(str(m["content"]).split()) for m in body["messages"])
            usage = {
                "prompt_tokens": length,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": claim(body, length)},
            }
            events: list[Json] = [{"choices": [{"delta": {"content": "Well done"}}]}]
            if b"DONE" in ends:
                events.append({"choices": [], "usage": usage})
            frames = [b"data: %s\n\n" % json.dumps(e).encode() for e in events]
            self._send(b"".join([*frames, ends]))

        def _send(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
