"""
A server with the sidecar's faces `/health` and `/v1/models`, for launcher tests.

STAND_IN_LOADING_S: so long `/health` says 503. STAND_IN_ONCE: a file; the second
start with it fails. STAND_IN_EVERY_FOURTH: a file that counts; starts 0, 4 .. come up,
the others fail. STAND_IN_STUBBORN: TERM is ignored. POST /sick: 503 and "stuck" from
then on. POST /busy: 503 for other reasons.
STAND_IN_FETCHING: `/health` says downloading until POST /fetched; GET /asked counts.
STAND_IN_WEIGHTS: `/health` says loading, and how far, until POST /loaded.
STAND_IN_FAULT: it cannot start, for that reason.
"""

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from litellm_mlx.identity import CHALLENGE, PROOF, SECRET_NAME, proof_of

MODELS = {
    "data": [
        {
            "id": "openai/mlx-tiny-agent",
            "max_input_tokens": 32768,
            "supports_function_calling": True,
            "supports_reasoning": False,
            "aliases": ["local"],
        }
    ]
}
is_fetching = "STAND_IN_FETCHING" in os.environ
reads_weights = "STAND_IN_WEIGHTS" in os.environ
WEIGHTS = {"done_bytes": 4_400_000_000, "total_bytes": 17_200_000_000}
num_asked = 0
says: str | None = None
ready_at = time.monotonic() + float(os.environ.get("STAND_IN_LOADING_S", "0"))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global num_asked
        num_asked += self.path == "/health"
        if self.path == "/asked":
            self.answer(200, {"asked": num_asked})
        elif self.path == "/health" and is_fetching:
            self.answer(503, {"status": "downloading"})
        elif self.path == "/health" and reads_weights:
            self.answer(200, {"status": "loading", "load": WEIGHTS})
        elif self.path == "/v1/models":
            wanted = os.environ.get("MLX_API_KEY")
            given = self.headers.get("Authorization")
            is_allowed = wanted is None or given == f"Bearer {wanted}"
            self.answer(200 if is_allowed else 401, MODELS)
        elif says is not None:
            self.answer(503, {"status": says})
        elif time.monotonic() < ready_at:
            self.answer(503, {"status": "loading"})
        else:
            self.answer(200, {"status": "ok", "memory_limit_bytes": 3 << 30})

    def do_POST(self) -> None:
        global says, is_fetching, reads_weights
        is_fetching = False
        reads_weights = reads_weights and self.path != "/loaded"
        if self.path == "/sick":
            says = "stuck"
        elif self.path == "/busy":
            says = "rate_limited"
        self.answer(200, {})

    def answer(self, code: int, body: dict[str, object]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        asked, secret = self.headers.get(CHALLENGE), os.environ.get(SECRET_NAME)
        if asked and secret:
            self.send_header(PROOF, proof_of(secret, asked))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model")
    parser.add_argument("--config")
    options = parser.parse_args()
    print(f"stand-in starts, model={options.model}", flush=True)
    if fault := os.environ.get("STAND_IN_FAULT"):
        sys.exit(f"mlx-sidecar: error: {fault}")
    once = os.environ.get("STAND_IN_ONCE")
    if once and Path(once).exists():
        sys.exit("cannot start a second time")
    if once:
        Path(once).touch()
    if counter := os.environ.get("STAND_IN_EVERY_FOURTH"):
        number = Path(counter).stat().st_size if Path(counter).exists() else 0
        Path(counter).write_text("x" * (number + 1))
        if number % 4:
            sys.exit(f"start {number} fails")
    if os.environ.get("STAND_IN_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
