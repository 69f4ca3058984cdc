"""`mlx-sidecar jsonl`: a process that is asked on stdin and answers on stdout."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]
_WAIT_S = 120.0


class Session:
    """A running process; its lines are read as they come."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", "jsonl"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def send(self, *commands: Json | str) -> None:
        assert self.process.stdin
        for command in commands:
            line = command if isinstance(command, str) else json.dumps(command)
            self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> Json:
        assert self.process.stdout
        found: Json = json.loads(self.process.stdout.readline())
        return found

    def until_done(self) -> list[Json]:
        """The lines of a generation, the last of which says that it ended."""
        lines = [self.read()]
        while "token" in lines[-1]:
            lines.append(self.read())
        return lines

    def end(self) -> tuple[int, str]:
        """Close its input; the exit code and what is left of its output."""
        rest, _ = self.process.communicate(timeout=_WAIT_S)
        return self.process.returncode, rest


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.process.kill()
    session.process.communicate()


@pytest.fixture
def load(model_folder: Callable[[str], Path]) -> Json:
    path = str(model_folder("dense"))
    return {"cmd": "load", "path": path, "settings": {"CACHE_SELFTEST": "off"}}


def test_a_cancel_in_mid_stream_and_two_commands_in_the_queue(
    session: Session, load: Json
) -> None:
    session.send(load)
    loaded = session.read()
    assert (loaded["ok"], loaded["vocab_size"]) == (True, 3072)
    session.send({"cmd": "generate", "prompt": "x", "max_tokens": 20_000, "id": "a"})
    first = session.read()
    assert set(first) == {"id", "token", "token_id"}
    session.send(
        {"cmd": "info", "id": "b"},
        {"cmd": "generate", "prompt": "one", "max_tokens": 3, "id": [3]},
        {"cmd": "cancel"},
    )
    *tokens, cancelled = session.until_done()
    assert cancelled == {"id": "a", "done": True, "cancelled": True}
    assert len(tokens) < 19_000
    info = session.read()
    assert (info["id"], info["layers"]) == ("b", 2)
    *tokens, done = session.until_done()
    assert len(tokens) == done["tokens_generated"] == 3
    assert done["finish_reason"] == "length"
    assert done["metrics"]["generated_tokens"] == 3
    assert all(line["id"] == [3] for line in (*tokens, done))
    session.send({"cmd": "cancel"}, {"cmd": "quit"})  # nothing runs: no answer
    assert session.end() == (0, "")


def test_all_commands_wait_their_turn(session: Session, load: Json) -> None:
    """As a pipe sends them: all at once, then the end of the input."""
    session.send(
        {"cmd": "info"},
        load,
        {"cmd": "chat", "messages": [{"role": "user", "content": "hi"}],
         "max_tokens": 4},
        {"cmd": "classify", "prompts": ["a", "b"], "labels": [" x", " y"]},
        {"cmd": "batch_generate", "prompts": ["a", ""], "max_tokens": 2},
        load,
        {"cmd": "info"},
    )  # fmt: skip
    code, rest = session.end()
    assert code == 0
    lines = [json.loads(line) for line in rest.splitlines()]
    assert "no model" in lines[0]["error"]
    assert lines[1]["ok"]
    tokens = [line for line in lines if "token" in line]
    assert sum(1 for line in tokens if line["token_id"] is not None) == 4
    classified, answered = (line["results"] for line in lines if "results" in line)
    assert [set(row["scores"]) for row in classified] == [{" x", " y"}] * 2
    assert [bool(row["error"]) for row in answered] == [False, True]
    assert lines[-2]["ok"]
    assert lines[-1]["vocab_size"] == 3072


MALFORMED: list[Json | str] = [
    "nonsense", "[]", "5", '"text"', "null", "{", '{"cmd": }', "{}", "\x00", "[" * 5000,
    {"cmd": None}, {"cmd": 5}, {"cmd": ""}, {"cmd": "fly"}, {"cmd": ["info"]},
    {"cmd": "generate"}, {"cmd": "generate", "prompt": None},
    {"cmd": "generate", "prompt": 5}, {"cmd": "generate", "prompt": ""},
    {"cmd": "generate", "prompt": []}, {"cmd": "generate", "prompt": ["a", 5]},
    {"cmd": "generate", "prompt": [-1]}, {"cmd": "generate", "prompt": [99_999_999]},
    {"cmd": "generate", "prompt": "x", "max_tokens": 0},
    {"cmd": "generate", "prompt": "x", "max_tokens": "many"},
    {"cmd": "generate", "prompt": "x", "temperature": -1},
    {"cmd": "generate", "prompt": "x", "stop": 5},
    {"cmd": "generate", "prompt": "x", "tint": "blue"},
    {"cmd": "generate", "prompt": "x", "stream": True},
    {"cmd": "generate", "prompt": "x", "n": 3},
    {"cmd": "generate", "prompt": ["a", "b"]},
    {"cmd": "chat"}, {"cmd": "chat", "messages": "hi"}, {"cmd": "chat", "messages": []},
    {"cmd": "chat", "messages": [5]}, {"cmd": "chat", "messages": [{"role": "x"}]},
    {"cmd": "chat", "messages": [{"role": "user", "content": 5}]},
    {"cmd": "chat", "messages": [{"role": "user", "content": "x"}], "tools": 5},
    {"cmd": "classify"}, {"cmd": "classify", "prompts": 5},
    {"cmd": "classify", "prompts": ["x"], "labels": "y"},
    {"cmd": "classify", "prompts": ["x"], "labels": ["y"]},
    {"cmd": "classify", "prompts": ["x"], "tint": 1},
    {"cmd": "batch_generate"}, {"cmd": "batch_generate", "prompts": 5},
    {"cmd": "batch_generate", "prompts": []},
    {"cmd": "load", "path": 5}, {"cmd": "load", "path": "/nothing/there"},
    {"cmd": "load", "settings": {"MAX_KV_SIZE": 5}},
    {"cmd": "load", "settings": {"MAX_KV_SIZE": "many"}},
    {"cmd": "load", "tint": "blue"},
]  # fmt: skip


def test_fifty_malformed_lines_end_nothing(session: Session, load: Json) -> None:
    assert len(MALFORMED) >= 50
    session.send(load)
    assert session.read()["ok"]
    for line in MALFORMED:
        session.send(line)
        assert set(session.read()) == {"error"}, line
        if isinstance(line, dict) and line.get("cmd") == "load":
            session.send(load)  # a load that fails has let the former model go
            assert session.read()["ok"]
    session.send({"cmd": "generate", "prompt": "one", "max_tokens": 2})
    assert len(session.until_done()) == 3


def test_a_cancel_right_behind_its_call(session: Session, load: Json) -> None:
    """In the same write: it comes before the call has begun."""
    session.send(load)
    assert session.read()["ok"]
    for _ in range(5):
        call = {"cmd": "generate", "prompt": "a", "max_tokens": 2000}
        session.send(call, {"cmd": "cancel"})
        assert session.until_done()[-1] == {"done": True, "cancelled": True}
    session.send({"cmd": "generate", "prompt": "a", "max_tokens": 2})
    assert session.until_done()[-1]["finish_reason"] == "length"


def test_bytes_that_are_no_text(load: Json) -> None:
    """Whatever the locale: what was sent before is done."""
    generate = json.dumps({"cmd": "generate", "prompt": "a", "max_tokens": 1}).encode()
    lines = [json.dumps(load).encode(), generate, b"\xff\xfe", generate]
    ended = subprocess.run(
        [sys.executable, "-m", "sidecar", "jsonl"], input=b"\n".join(lines) + b"\n",
        capture_output=True, timeout=_WAIT_S, check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert sum("finish_reason" in one for one in found) == 2
    assert {"error": "the line is no JSON"} in found


def test_a_reader_that_goes_away(session: Session, load: Json) -> None:
    session.send(load)
    assert session.read()["ok"]
    session.send({"cmd": "generate", "prompt": "a", "max_tokens": 2000})
    session.read()
    assert session.process.stdout
    session.process.stdout.close()
    assert session.process.wait(_WAIT_S) == 0


def test_a_load_that_cannot_be_leaves_the_model(session: Session, load: Json) -> None:
    session.send(load)
    assert session.read()["ok"]
    for bad in (
        {"path": "/nonexistent"},
        {"settings": {"NOPE": "1"}},
        {"settings": {"MAX_KV_SIZE": "x"}},
    ):
        session.send({"cmd": "load", **bad}, {"cmd": "info"})
        assert "error" in session.read()
        assert "vocab_size" in session.read()


@pytest.mark.parametrize(
    "command",
    [
        {"cmd": "info", "banana": 1},
        {"cmd": "generate", "prompt": "a", "logprobs": 5},
        {"cmd": "chat", "messages": [], "top_logprobs": 0},
    ],
)
def test_what_has_no_effect_is_refused(
    session: Session, load: Json, command: Json
) -> None:
    session.send(load, command)
    assert session.read()["ok"]
    assert "error" in session.read()


def test_conversations_are_classified(session: Session, load: Json) -> None:
    talks = [[{"role": "user", "content": "a"}]]
    session.send(load, {"cmd": "classify", "messages": talks})
    assert session.read()["ok"]
    assert len(session.read()["results"]) == 1
