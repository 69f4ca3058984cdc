"""The line at a request's start: what its light says."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.config.settings import GenerationConfig
from sidecar.core.prompt import Hit, Retreat
from sidecar.core.requests import short_id
from sidecar.dialects.openai_chat.request import parse_chat
from sidecar.engine.sampling import settle
from sidecar.infra.session_log import LogLimits, SessionLog
from sidecar.service.request_log import RequestLog, light
from testkit.chats import Chats, Client
from testkit.raw_http import eventually
from testkit.servers import running_sidecar

LOGGER = "sidecar.service.request_log"
ENDED = "sidecar.service.turn"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("cached", "is_new", "expected"),
    [(85, False, "green"), (84, False, "yellow"), (50, False, "yellow"),
     (49, False, "red"), (0, False, "red"),
     (85, True, "green"), (60, True, "new"), (0, True, "new")],
)  # fmt: skip
def test_the_light(cached: int, is_new: bool, expected: str) -> None:
    """By the share that is reused; where nothing was stored, nothing was lost."""
    assert light(cached, 100, is_new=is_new) == expected


def test_a_conversation_begins_new_and_is_red_only_when_it_lost_something(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """New, green as it goes on, red when its beginning was rewritten."""

    def ask(*texts: str) -> None:
        roles = ["system", "user", "assistant", "user"]
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles, texts, strict=False)
        ]
        body = {"messages": messages, "max_tokens": 2, "session_id": "lights"}
        url = f"{app.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 200

    rules = "Count the lamps. " + " ".join(f"lamp{i}" for i in range(200))
    with caplog.at_level(logging.INFO, LOGGER):
        ask(rules, "What is lit?")
        ask(rules, "What is lit?", "One.", "And now?")
        ask(f"Forget all. {rules}", "What is lit?", "One.", "And now?")
    said = " ".join(record.getMessage() for record in caplog.records)
    assert re.findall(r"light=(\w+)", said) == ["new", "green", "red"]


def test_the_line_at_the_end_tells_the_speed_of_the_answer(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens by the time since the first of them; nobody is told of 0 a second."""
    body = {"messages": [{"role": "user", "content": "Count to nine."}]}
    url = f"{app.url}/v1/chat/completions"
    with caplog.at_level(logging.INFO, ENDED):
        answer = httpx.post(url, json={**body, "max_tokens": 5}, timeout=60).json()
        # The line is written behind the answer.
        assert eventually(lambda: "request ended" in caplog.text)
    (line,) = re.findall("request ended .*", caplog.text)
    told = dict(re.findall(r"(\w+)=(\S+)", line))
    assert int(told["output"]) == answer["usage"]["completion_tokens"] > 0
    after_first_s = float(told["seconds"]) - float(told["ttft_s"]) + 0.01  # rounded
    assert float(told["tps"]) >= 0.9 * int(told["output"]) / max(after_first_s, 0.01)


@pytest.mark.parametrize(
    ("fields", "source"),
    [({"session_id": "s"}, "body.session_id"),
     ({"metadata": {"thread_id": "s"}}, "metadata.thread_id"),
     ({"extra_body": {"chat_id": 7}}, "extra_body.chat_id"),
     ({"x_mlx": {"session": "s"}}, "x_mlx.session"),
     ({"session_id": ""}, "implicit")],
)  # fmt: skip
def test_the_file_says_where_the_session_is_from(
    tmp_path: Path, fields: dict[str, Any], source: str
) -> None:
    """Its parents and branch as well, cut to a length, and the temperature."""
    ids = {"parent_session_id": "p" * 500, "branch_id": "b"}
    body = {"messages": [{"role": "user", "content": "hi"}], **fields, **ids}
    request, _ = parse_chat({**body, "temperature": 0.5}, "r", "agent/1")
    prepared = Chats().prepare(request.messages, Client("s"))
    log = SessionLog(tmp_path, LogLimits(1 << 20, 0), with_content=False)
    sampling = settle(request.options.sampling, GenerationConfig(), {})
    RequestLog(log, request, prepared, sampling).started(9)
    (file,) = tmp_path.glob("*/*.log")
    meta = json.loads(file.read_text().splitlines()[1])["request_meta"]
    assert meta["session_source"] == source
    assert meta["parent_sessions"] == [short_id("p" * 500)]  # as that session's own
    assert meta["parent_sources"] == ["body.parent_session_id"]
    assert (meta["branch"], meta["branch_source"]) == ("b", "body.branch_id")
    assert meta["temperature"] == 0.5


@pytest.mark.parametrize(
    ("hit", "shown"),
    [(Hit(40), {}),
     (Hit(40, retreat=Retreat("vlm_retreat", 7)), {"vlm_retreat": 7}),
     (Hit(40, 44, retreat=Retreat("hybrid_trim_miss", 9)), {"hybrid_trim_miss": 5}),
     (Hit(40, 49, retreat=Retreat("hybrid_trim_miss", 9)), {})],
    ids=["none", "image", "the disk had some of it", "the disk had it"],
)  # fmt: skip
def test_what_is_stored_in_vain_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hit: Hit, shown: dict[str, int]
) -> None:
    """In the line and in the file: tokens that are in memory, and computed again."""
    request, _ = parse_chat({"messages": HI}, "r", "agent/1")
    prepared = Chats().prepare(request.messages, Client("s")).with_hit(hit)
    log = SessionLog(tmp_path, LogLimits(1 << 20, 0), with_content=False)
    sampling = settle(request.options.sampling, GenerationConfig(), {})
    with caplog.at_level(logging.INFO, LOGGER):
        RequestLog(log, request, prepared, sampling).started(9)
    (file,) = tmp_path.glob("*/*.log")
    meta = json.loads(file.read_text().splitlines()[1])["request_meta"]
    causes = ("vlm_retreat", "hybrid_trim_miss")
    assert {name: meta[name] for name in causes if name in meta} == shown
    told = re.findall(r" (vlm_retreat|hybrid_trim_miss)=(\d+)", caplog.text)
    assert {name: int(number) for name, number in told} == shown


@pytest.fixture(scope="module")
def logging_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[App, Path]]:
    """A sidecar that logs its requests, and where."""
    root = tmp_path_factory.mktemp("logs")
    settings = {"ENABLE_REQUEST_LOGGING": "true", "LOG_ROOT": str(root)}
    with running_sidecar(settings) as running:
        yield running, root


def prompt_metas(root: Path, session: str) -> list[dict[str, Any]]:
    """What was logged of each prompt of a session."""
    name = hashlib.sha1(session.encode()).hexdigest()[:16]
    (file,) = root.glob(f"*/cache-session-{name}.log")
    blocks = file.read_text().split("\n\n")
    told = [b.partition("\n")[2] for b in blocks if "direction=prompt" in b]
    return [json.loads(text)["request_meta"] for text in told]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
     ("/chat/completions", {"messages": HI, "max_tokens": 2}),
     ("/v1/messages", {"messages": HI, "max_tokens": 2}),
     ("/v1/responses", {"input": "hi", "max_output_tokens": 2})],
)  # fmt: skip
def test_the_file_says_where_and_how_it_was_asked(
    logging_app: tuple[App, Path], path: str, body: dict[str, Any], stream: bool
) -> None:
    """The path, whether it was streamed, and the family that its answer is read by."""
    app, root = logging_app
    session = f"{path} {stream}"
    asked = {**body, "stream": stream, "session_id": session}
    assert httpx.post(f"{app.url}{path}", json=asked, timeout=60).status_code == 200
    (meta,) = prompt_metas(root, session)
    assert (meta["path"], meta["stream"]) == (path, stream)
    assert meta["family"] == "qwen3"  # the built-in model's


def test_the_file_says_how_much_of_the_key_is_new_and_which_counters_moved(
    logging_app: tuple[App, Path],
) -> None:
    """Another clock is no new text; the turn put back and the pin are counted."""
    app, root = logging_app
    url, words = f"{app.url}/v1/chat/completions", " ".join(f"w{i}" for i in range(300))

    def ask(clock: str, *more: dict[str, str]) -> dict[str, Any]:
        system = f"Current time is {clock}.\n{words}"
        messages = [{"role": "system", "content": system}, *HI, *more]
        body = {"messages": messages, "max_tokens": 4, "session_id": "delta"}
        answer = httpx.post(url, json={**body, "temperature": 0}, timeout=60).json()
        return dict(answer["choices"][0]["message"])

    said = ask("10:05")
    echo = {"role": "assistant", "content": said["content"] or ""}
    ask("10:06", echo, {"role": "user", "content": "Mind the gap."})
    cold, warm = prompt_metas(root, "delta")
    assert cold["cache_key_delta_chars"] > len(words)
    assert len("Mind the gap.") < warm["cache_key_delta_chars"] < 300
    assert warm["counters"]["pin_current_time"] == 1
    assert warm["counters"]["pin_tokens_gained"] > 300
    assert not any(name.startswith("pin") for name in cold["counters"])
