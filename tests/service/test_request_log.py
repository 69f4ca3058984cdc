"""The line at a request's start: what its light says."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.config import GenerationConfig
from sidecar.core.prompt import ModelIds, PreparedPrompt
from sidecar.engine.sampling import settle
from sidecar.infra.session_log import LogLimits, SessionLog
from sidecar.protocols.openai_chat import parse_chat
from sidecar.service.request_log import RequestLog, light
from tests.support.raw_http import eventually

LOGGER = "sidecar.service.request_log"
ENDED = "sidecar.service.generation"


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
    prompt = PreparedPrompt(ModelIds((1,)), "hi", False, False, session="s")
    log = SessionLog(tmp_path, LogLimits(1 << 20, 0), with_content=False)
    sampling = settle(request.options.sampling, GenerationConfig(), {})
    RequestLog(log, request, prompt).started(sampling, 9)
    (file,) = tmp_path.glob("*/*.log")
    meta = json.loads(file.read_text().splitlines()[1])["request_meta"]
    assert meta["session_source"] == source
    assert meta["parent_sessions"] == ["p" * 128]
    assert (meta["branch"], meta["temperature"]) == ("b", 0.5)
