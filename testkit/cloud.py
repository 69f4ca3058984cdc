"""A stand-in for a cloud on the user's key: counts what reaches it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MESSAGE = {"role": "assistant", "content": "SPENT"}
ANSWER = {
    "id": "1", "object": "chat.completion", "created": 1, "model": "x",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
}  # fmt: skip


class Cloud:
    """Answers all alike; `asked` are the paths."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                cloud.asked.append(self.path)
                self.rfile.read(int(self.headers.get("content-length", 0)))
                body = json.dumps(ANSWER).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_arguments: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextlib.contextmanager
def running_cloud() -> Iterator[Cloud]:
    """One that listens; closed at the end."""
    one = Cloud()
    thread = threading.Thread(target=one.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield one
    finally:
        one.server.shutdown()
        one.server.server_close()
        thread.join(10)


def cloud_config(cloud: Cloud, **general: str) -> dict[str, Any]:
    """A cloud model on the user's key beside the local one."""
    params = {"model": "openai/x", "api_base": f"{cloud.url}/v1", "api_key": "sk-cloud"}
    return {
        "model_list": [{"model_name": "cloud", "litellm_params": params}],
        "general_settings": dict(general),
    }
