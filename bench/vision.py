"""
An agent's talk with screenshots: how long each turn takes until its first token.

    python -m bench vision [--turns 20] [--every 2] [--large]

Each turn sends the whole history again, with a new picture in every second one. Then
all is forgotten, and the last turn is asked cold. One run, one server.
"""

import argparse
import base64
import io
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from PIL import Image

from bench.servers import Setup, peer_server
from testkit.tiny_vision import make_seeing

_TIMEOUT_S = 600.0
_WORDS = "what is new on this screen, and what follows from it for the task at hand? "


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it had, and what it cost."""

    has_image: bool
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = Path(options.model or root / "seeing")
        make_seeing(model, "seeing", hidden=128, large=options.large)
        setup = Setup(model, None, Path(__file__).parents[1], root)
        command = "python -m sidecar --port {port} --model {model} --model-dir none"
        with peer_server(setup, "sidecar", command) as port:
            _run(f"http://127.0.0.1:{port}", options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench vision", description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--every", type=int, default=2, help="turns between pictures")
    parser.add_argument("--size", default="1024x768", help="of a picture")
    parser.add_argument("--large", action="store_true", help="8 B, for a GPU")
    parser.add_argument("--model", help="where to put the model, and to find it again")
    return parser


def _run(url: str, options: argparse.Namespace) -> None:
    width, height = map(int, options.size.split("x"))
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
        _ask(http, [_user("hello", None)])  # what only a first request does
        talk: list[dict[str, Any]] = []
        turns = []
        for number in range(options.turns):
            shown = (
                _picture(number, width, height) if number % options.every == 0 else None
            )
            talk.append(_user(f"turn {number}: {_WORDS * 12}", shown))
            turn, said = _ask(http, talk)
            turns.append(turn)
            talk.append({"role": "assistant", "content": said})
        http.post("/admin/cache/clear").raise_for_status()
        cold, _ = _ask(http, talk[:-1])
    _report(turns, cold)


def _report(turns: list[Turn], cold: Turn) -> None:
    say = sys.stdout.write
    say("turn  picture  tokens  computed  first token\n")
    for number, turn in enumerate(turns):
        new = turn.prompt_tokens - turn.cached_tokens
        shown = "yes" if turn.has_image else ""
        say(f"{number:4}  {shown:7}  {turn.prompt_tokens:6}  {new:8}  "
            f"{1000 * turn.ttft_s:8.0f} ms\n")  # fmt: skip
    warm = {
        kind: statistics.median(t.ttft_s for t in turns[2:] if t.has_image == kind)
        for kind in (True, False)
    }
    say(f"cold, all of it:  {cold.prompt_tokens} tokens, {1000 * cold.ttft_s:.0f} ms\n")
    for kind, name in ((True, "with a new picture"), (False, "text only")):
        say(f"warm, {name}: median {1000 * warm[kind]:.0f} ms, "
            f"{cold.ttft_s / warm[kind]:.0f} times as fast as cold\n")  # fmt: skip


def _ask(http: httpx.Client, talk: list[dict[str, Any]]) -> tuple[Turn, str]:
    body = {
        "messages": talk, "max_tokens": 24, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True}, "enable_thinking": False,
    }  # fmt: skip
    sent = orjson.dumps(body)  # a client's own time is not the server's
    headers = {"content-type": "application/json"}
    started, first, said = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    path = "/v1/chat/completions"
    with http.stream("POST", path, content=sent, headers=headers) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
            text = delta.get("content") or delta.get("reasoning_content") or ""
            if text and not first:
                first = time.perf_counter() - started
            said += delta.get("content") or ""
    has_image = isinstance(talk[-1]["content"], list) and len(talk[-1]["content"]) > 1
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(has_image, usage["prompt_tokens"], cached, first), said


def _user(text: str, shown: str | None) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if shown is not None:
        parts.append({"type": "image_url", "image_url": {"url": shown}})
    return {"role": "user", "content": parts}


def _picture(seed: int, width: int, height: int) -> str:
    """A coarse pattern, so that it is of the size that screenshots have as files."""
    rows = np.random.default_rng(seed).integers(
        0, 256, (height // 8, width // 8, 3), dtype=np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(rows).resize((width, height)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
