"""
Recorded agent sessions by the clock, beside mlx_lm.server.

    python -m bench replay --model FOLDER [TRACE ...] [--peer-seconds 60] [--json FILE]

Each session is sent request by request, the next when the last is answered. Ours says
what was recorded (all else as in production; the client is a thread of the same
process, which costs ours a little). mlx_lm.server then gets the same Chat bodies and
says as many tokens of its own; of a session it gets the requests that begin within the
time it is given, and the table compares those.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench.blas import build_shim
from bench.exact import template_kwargs
from bench.facts import facts
from bench.named_traces import parse_traces
from bench.servers import Setup, mlx_lm_server
from sidecar.app import App
from sidecar.engine.job import Job
from sidecar.engine.sampling import LogitsProcessor
from testkit.reuse import Recorder, Served, as_rendered, serve_trace
from testkit.servers import running_sidecar
from testkit.traces import load_trace

_REPOSITORY = Path(__file__).parents[1]
_REQUEST_S = 300.0
_WARM_PROMPT = "word " * 3000


@dataclass(frozen=True, slots=True)
class Timed:
    """
    A session's requests, as ours answered them.

    Args:
        seconds: of each, from the send to the last byte. num_said: tokens of each.
    """

    name: str
    served: list[Served]
    seconds: list[float]
    num_said: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One session, both sides over the same first `compared` requests."""

    name: str
    requests: int
    prompt_tokens: int
    prefilled: int
    ours_s: float
    compared: int = 0
    ours_compared_s: float = 0.0
    theirs_s: float = 0.0
    note: str = ""


class _Stopwatch(httpx.Client):
    """Notes how long each streamed answer took, to its last byte."""

    def __init__(self, url: str) -> None:
        super().__init__(base_url=url, timeout=_REQUEST_S, trust_env=False)
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def stream(self, *arguments: Any, **named: Any) -> Iterator[httpx.Response]:
        """As httpx's, on the clock."""
        started = time.perf_counter()
        with super().stream(*arguments, **named) as response:
            yield response
        self.seconds.append(time.perf_counter() - started)


class _Current:
    """One server for all sessions: each in turn decides what is said."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def processors(self, job: Job, choice: int) -> list[LogitsProcessor]:
        return self.recorder.processors(job, choice) if self.recorder else []


def main(argv: list[str] | None = None) -> int:
    """Replay on both, print."""
    options = _options(argv)
    print("\n".join(f"{name}: {value}" for name, value in facts().items()), flush=True)
    # A process of its own: MLX keeps the memory it had, and the peer needs it.
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        all_timed = apart.submit(_ours, options.model, options.traces).result()
    rows = {timed.name: _row(timed) for timed in all_timed}
    if options.peer_seconds:
        try:
            for row in _theirs(options, all_timed):
                rows[row.name] = row
                print(_line(row), flush=True)
        except ChildProcessError as error:  # ours is worth its table without it
            print(f"mlx_lm.server: {error}", flush=True)
    print("\n" + "\n".join([_HEAD, *map(_line, rows.values())]))
    if options.json:
        found = [asdict(row) for row in rows.values()]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _ours(model: Path, names: Sequence[str]) -> list[Timed]:
    """Each session on an empty store."""
    current, all_timed = _Current(), []
    settings = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "on_load"}
    with running_sidecar(settings, current.processors) as app:
        routes = app.listener.routes
        httpx.post(f"{app.url}/v1/completions", timeout=_REQUEST_S, json={
            "prompt": _WARM_PROMPT, "max_tokens": 2})  # fmt: skip
        for name in names:
            app.listener.routes = routes
            timed = _serve(app, current, name, model)
            print(_line(_row(timed)), flush=True)
            all_timed.append(timed)
            _forget(app)
    return all_timed


def _serve(app: App, current: _Current, name: str, model: Path) -> Timed:
    trace = load_trace(name)
    recorder = Recorder(trace, as_rendered)
    recorder.listen(app)
    current.recorder = recorder
    with _Stopwatch(app.url) as http:
        served = serve_trace(trace, recorder, http, "local")
        seconds = http.seconds
    current.recorder = None
    encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    said = [len(encode(turn.said, add_special_tokens=False).ids) + 1 for turn in served]
    return Timed(name, served, seconds, said)


def _forget(app: App) -> None:
    served: Any = next(iter(app.pool.loaded()), None)
    assert served is not None
    served.memory.forget()


def _theirs(options: argparse.Namespace, all_timed: Sequence[Timed]) -> Iterator[Row]:
    """Each session from its beginning, for as long as it is given."""
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        shim = build_shim(Path(tempfile.gettempdir()))
        setup = Setup(options.model, shim, _REPOSITORY, Path(scratch))
        left = list(all_timed)
        while left:
            with (
                mlx_lm_server(setup) as port,
                _Stopwatch(f"http://127.0.0.1:{port}") as http,
            ):
                _ask(http, {"messages": [{"role": "user", "content": _WARM_PROMPT}]}, 2)
                is_alive = True
                while left and is_alive:
                    row = _replay_peer(http, left.pop(0), options.peer_seconds)
                    is_alive = not row.note
                    yield row


def _replay_peer(http: httpx.Client, timed: Timed, limit_s: float) -> Row:
    spent: list[float] = []
    note = ""
    for turn, num_said in zip(timed.served, timed.num_said, strict=True):
        if sum(spent) >= limit_s:
            break
        body = {
            "messages": turn.body["messages"],
            "tools": turn.body.get("tools"),
            "chat_template_kwargs": template_kwargs(turn),
        }
        started = time.perf_counter()
        try:
            _ask(http, body, num_said)
        except httpx.HTTPError as error:
            note = f"ended: {type(error).__name__}"
            break
        spent.append(time.perf_counter() - started)
    return _row(timed, len(spent), sum(spent), note)


def _ask(http: httpx.Client, body: dict[str, Any], num_tokens: int) -> None:
    asked = {**body, "max_tokens": num_tokens, "temperature": 0.0}
    http.post("/v1/chat/completions", json=asked).raise_for_status()


def _row(timed: Timed, compared: int = 0, theirs_s: float = 0.0, note: str = "") -> Row:
    return Row(
        timed.name,
        len(timed.served),
        sum(turn.prompt_len for turn in timed.served),
        sum(turn.prefilled_len for turn in timed.served),
        sum(timed.seconds),
        compared,
        sum(timed.seconds[:compared]),
        theirs_s,
        note,
    )


_HEAD = (
    f"{'session':<26}{'requests':>9}{'prompt':>9}{'prefilled':>10}{'ours, s':>9}"
    f"{'compared':>10}{'ours, s':>9}{'theirs, s':>10}{'theirs / ours':>14}"
)


def _line(row: Row) -> str:
    ratio = f"{row.theirs_s / row.ours_compared_s:.1f}" if row.compared else "-"
    return (
        f"{row.name:<26}{row.requests:>9}{row.prompt_tokens:>9}{row.prefilled:>10}"
        f"{row.ours_s:>9.1f}{row.compared:>10}{row.ours_compared_s:>9.1f}"
        f"{row.theirs_s:>10.1f}{ratio:>14}  {row.note}".rstrip()
    )


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench replay", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="(all)")
    parser.add_argument("--model", type=Path, required=True, help="its folder")
    parser.add_argument(
        "--peer-seconds", type=float, default=60.0,
        help="for mlx_lm.server, a session; 0: it is not asked (60)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parse_traces(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
