"""
Asks a model for values that drifted, and counts right answers by kind and policy.

    mlx-sidecar probe --quality [--model MODEL] [--questions N] [--depth WORDS]

Each question is two requests: one with the older value, which fills the cache, then one
with the newer value and the question, a long history behind the value. A server is
started for each policy (CACHE_PIN_POLICY), one after the other, and asked the same
questions. docs/reuse.md, section 12, says how to read what is printed.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from sidecar.app import App, build, serve_in_thread
from sidecar.cli.quality_questions import (
    KINDS,
    QualityQuestion,
    make_questions,
)
from sidecar.cli.quality_report import (
    POLICIES,
    QualityAnswer,
    Score,
    answer_json,
    applies,
    draw,
    score,
    score_json,
    table,
)
from sidecar.cli.server import Json, Server, ServerError, at_least
from sidecar.config.settings import Config, load_config
from sidecar.config.sources import ConfigError
from sidecar.engine.loading.checkpoint_files import memory_limit
from sidecar.engine.loading.model_place import BUILTIN_NAME, early_fault
from sidecar.infra.logs import setup_logging

# A server under one of the policies, for as long as it is asked.
Serve = Callable[[str], AbstractContextManager[Server]]

_BUILTIN = ("built-in", "builtin", BUILTIN_NAME)
_LOAD_S = 3600.0  # a download is part of it
_STOP_S = 60.0
_NUM_WARM_UPS = 10
_WARM_UP_PAUSE_S = 2.0
_MIN_DEPTH = 240  # words: what a pin gains must be seen in the counts


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 1 a policy was not in force or no answer, 2 bad usage."""
    options = _parser().parse_args(argv)
    setup_logging("ERROR", {})
    questions = make_questions(options.questions, options.depth, options.seed)
    asks = {
        "model": "local",
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "enable_thinking": options.think,
    }
    _say(
        f"model={options.model or 'MODEL_PATH'} questions={options.questions} "
        f"depth={options.depth} seed={options.seed}\n"
    )
    try:
        answers = ask_all(questions, lambda name: _serving(options.model, name), asks)
    except ConfigError as error:
        return _refuse(error, 2)
    except (ServerError, OSError) as error:
        return _refuse(error, 1)
    scores = score(answers)
    _say(table(scores))
    if num_empty := sum(not answer.text for answer in answers):
        _say(f"{num_empty} answers were empty: cut off in their thinking? --max-tokens")
    num_void = sum(not answer.is_in_force for answer in answers)
    if num_void:
        _say(f"FAIL {num_void} answers not counted: their policy was not in force")
    try:
        _write(options, scores, answers)
    except OSError as error:
        return _refuse(error, 1)
    return 1 if num_void else 0


def ask_all(
    questions: Sequence[QualityQuestion], serve: Serve, asks: Json
) -> list[QualityAnswer]:
    """
    Ask a server of each policy the questions that it applies to.

    Args:
        asks: what every request holds.
    Raises:
        ServerError: a server did not start or did not answer.
    """
    answers: list[QualityAnswer] = []
    for policy in POLICIES:
        with serve(policy) as server:
            _warm_up(server, policy, asks)
            to_ask = [q for q in questions if applies(policy, q.kind)]
            for number, question in enumerate(to_ask, 1):
                answers.append(_ask(server, question, policy, asks))
                if number % 20 == 0 or number == len(to_ask):
                    _tell(f"{policy}: {number} of {len(to_ask)} questions")
    return answers


def _warm_up(server: Server, policy: str, asks: Json) -> None:
    """Ask beside the count until reuse is proved on this model, for a while."""
    for question in make_questions(_NUM_WARM_UPS, 600, -1):
        if _ask(server, question, policy, {**asks, "max_tokens": 1}).is_in_force:
            return
        time.sleep(_WARM_UP_PAUSE_S)


def _ask(
    server: Server, question: QualityQuestion, policy: str, asks: Json
) -> QualityAnswer:
    asks = {**asks, "session_id": question.conversation}
    moves = question.kind.moves
    first = {**asks, "messages": question.before}
    before = server.chat(first if moves else {**first, "max_tokens": 1})
    *history, noted, asked = question.after
    # What a client leaves out is put back only before an answer of the model's own.
    answered = before.message if moves else noted
    reply = server.chat({**asks, "messages": [*history, answered, asked]})
    return QualityAnswer(question, policy, before.prompt_len, reply)


@contextlib.contextmanager
def _serving(model: str | None, policy: str) -> Iterator[Server]:
    """A server of this process, for nobody else, with the user's settings but these."""
    with tempfile.TemporaryDirectory() as home:  # nor what was set by hand
        app = build(_config(model, policy, home))
        thread = serve_in_thread(app)
        server = Server(app.url, app.config.server.api_key)
        try:
            _wait_ready(app, server)
            yield server
        finally:
            app.stop_listening()
            app.close()
            thread.join(_STOP_S)


def pin_policy(policy: str) -> str:
    """CACHE_PIN_POLICY: this policy for all kinds that are asked about."""
    return json.dumps({kind.rule: policy for kind in KINDS})


def _config(model: str | None, policy: str, home: str) -> Config:
    flags = {
        "MLX_CACHE_HOME": home,
        "MLX_HOST": "127.0.0.1",
        "MLX_PORT": "0",
        "MODEL_DIR": "none",
        "CACHE_PINNING": "true",
        "CACHE_CANONICALIZE_TOOL_CONTEXT": "true",
        "CACHE_PIN_POLICY": pin_policy(policy),
        "CACHE_SELFTEST": "on_load",  # what is not proved yet is not reused
        "KV_DISK_PERSISTENCE": "false",
        "ENABLE_REQUEST_LOGGING": "false",
    }
    config = load_config(flags, Path(".env"))
    path = config.model.path if model is None else model
    only = replace(
        config.model,
        path=None if path in _BUILTIN else path,
        pinned=(),
        preload=(),
        settings_path=None,
    )
    engine = config.engine
    limit = memory_limit(engine.max_process_bytes, engine.max_model_bytes)
    if fault := early_fault(only.path, limit):
        raise ServerError(fault)
    return replace(config, model=only)


def _wait_ready(app: App, server: Server) -> None:
    deadline = time.monotonic() + _LOAD_S
    while server.get("/health")["status"] != "ok":
        if fault := app.pool.entry("").load_error:
            raise ServerError(fault)
        if time.monotonic() > deadline:
            raise ServerError(f"the model was not ready within {_LOAD_S:g} seconds")
        time.sleep(0.1)


def _write(
    options: argparse.Namespace,
    scores: Sequence[Score],
    answers: Sequence[QualityAnswer],
) -> None:
    if options.json:
        asked = {
            n: getattr(options, n) for n in ("model", "questions", "depth", "seed")
        }
        report = {
            **asked,
            "scores": [score_json(one) for one in scores],
            "answers": [answer_json(answer) for answer in answers],
        }
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if options.plot:
        try:
            draw(scores, options.plot)
            _say(f"picture: {options.plot}")
        except ImportError:
            _tell(f"no picture in {options.plot}: matplotlib (extra plot) is missing")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"probe: {text}\n")


def _refuse(error: Exception, code: int) -> int:
    _tell(str(error))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar probe --quality",
        description="Asks a model for values that drifted, under each policy of "
        "CACHE_PIN_POLICY, on servers that it starts itself, and counts right answers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="folder, hub id or `built-in` (MODEL_PATH)")
    add(
        "--questions",
        type=at_least(1),
        default=200,
        help="questions for each policy (%(default)s)",
    )
    add(
        "--depth",
        type=at_least(_MIN_DEPTH),
        default=1500,
        help="words between a value and its question (%(default)s)",
    )
    add("--seed", type=at_least(0), default=0, help="decides all texts (%(default)s)")
    add(
        "--max-tokens",
        type=at_least(1),
        default=128,
        help="longest answer; thinking counts (%(default)s)",
    )
    add("--think", action="store_true", help="let the model think first (off)")
    add("--json", type=Path, metavar="FILE", help="write scores and answers (off)")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        default=Path("quality.png"),
        help="write a picture (%(default)s)",
    )
    return parser
