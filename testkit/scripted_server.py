"""
A sidecar that plays the task model, for running real agents against it.

    python -m testkit.scripted_server --proxy-port 4000 --cwd SCRATCH

With `--proxy-port` a LiteLLM proxy stands in front of it, as in production. Requests
as they reach the sidecar are kept with `--log FILE`, one JSON line each.
"""

import argparse
import contextlib
import json
import logging
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidecar.core.errors import SidecarError
from sidecar.server.http_messages import Endpoint, EventStream, Request, Response
from sidecar.server.router import Routes
from testkit.proxy import running_proxy
from testkit.scripted import scripted
from testkit.servers import running_sidecar
from testkit.task_rules import TaskRules
from testkit.tiny_models import make_model


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal comes."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(
            Path(folder) / f"scripted-{options.model}",
            options.model,
            layers=options.layers,
            hidden=options.hidden,
        )
        settings = {"MODEL_PATH": str(model), "MLX_PORT": str(options.port)}
        rules = scripted(TaskRules(str(Path(options.cwd).resolve())))
        with contextlib.ExitStack() as running:
            app = running.enter_context(running_sidecar(settings, rules))
            if options.log:
                app.listener.routes = _Recorder(app.listener.routes, options.log)
            print(f"scripted sidecar on {app.url}", flush=True)
            if options.proxy_port:
                proxy = running_proxy(app.url, Path(folder), port=options.proxy_port)
                print(f"proxy on {running.enter_context(proxy).url}", flush=True)
            _wait_for_signal()


def _wait_for_signal() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    stop.wait()


class _Recorder(Routes):
    """Routes that keep what was asked."""

    def __init__(self, routes: Routes, log: Path) -> None:
        self._routes = routes
        self._log = log
        self._lock = threading.Lock()
        self._num_seen = 0

    def find(self, method: str, path: str) -> tuple[Endpoint, str]:
        """The endpoint, which will write its request down first."""
        endpoint, tail = self._routes.find(method, path)

        def recorded(request: Request) -> Response | EventStream:
            if request.body:
                self._write(request)
            return endpoint(request)

        return recorded, tail

    def name(self, target: str) -> str:
        """As the routes themselves say."""
        return self._routes.name(target)

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        """As the routes themselves say."""
        return self._routes.problem(error, request_id, path)

    def _write(self, request: Request) -> None:
        with self._lock, self._log.open("a", encoding="utf-8") as file:
            self._num_seen += 1
            row: dict[str, Any] = {
                "seq": self._num_seen,
                "ts": round(time.time(), 3),
                "method": request.method,
                "path": request.path,
                "headers": {
                    k: v for k, v in request.headers.items() if k != "authorization"
                },
                "body": json.loads(request.body),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--port", type=int, default=8080)
    add("--proxy-port", type=int, help="also start LiteLLM, here")
    add("--cwd", required=True, help="where the agent works")
    add("--model", default="dense", help="kind of tiny model: dense, hybrid, sliding")
    add("--layers", type=int, default=1)
    add("--hidden", type=int, default=32)
    add("--log", type=Path, help="file for the requests that come")
    return parser


if __name__ == "__main__":
    main()
