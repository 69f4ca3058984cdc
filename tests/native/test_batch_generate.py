"""POST /native/batch_generate: each prompt is answered as if it had been sent alone."""

import contextlib
import http.client
import json
import time
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import ToolCall
from sidecar.dialects.native import parse_batch
from sidecar.service.native import _batch_answer
from testkit.raw_http import eventually
from testkit.servers import held_gpu
from tests.native.conftest import Ask

PROMPTS = ["a short one", "a somewhat longer text " * 9, "x", "another " * 40, "last"]


# Of the others the self-test, which is off here, finds that they take no batches.
@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_answers_are_those_of_single_requests(ask: Ask, kind: str) -> None:
    shared = {"model": kind, "max_tokens": 12, "temperature": 0}
    status, body = ask("/native/batch_generate", prompts=PROMPTS * 3, **shared)
    assert status == 200, body
    assert len(body["results"]) == len(PROMPTS) * 3
    for prompt, row in zip(PROMPTS * 3, body["results"], strict=True):
        _, single = ask("/v1/completions", prompt=prompt, **shared)
        (choice,) = single["choices"]
        assert (row["text"], row["finish_reason"]) == (
            choice["text"], choice["finish_reason"],
        )  # fmt: skip
        assert row["error"] is None
        assert 1 <= len(row["tokens"]) <= 12


def test_tokens_are_what_the_text_was_made_of(native_app: App, ask: Ask) -> None:
    _, body = ask("/native/batch_generate", model="dense", prompts=PROMPTS,
                  max_tokens=9, temperature=0)  # fmt: skip
    with native_app.pool.lease("dense") as served:
        tokenizer = served.engine.model.tokenizer
    for row in body["results"]:
        assert tokenizer.decode(row["tokens"]).startswith(row["text"].rstrip("\ufffd"))


def test_conversations_are_answered_as_chats(ask: Ask) -> None:
    talks = [[{"role": "user", "content": text}] for text in PROMPTS]
    shared = {"model": "dense", "max_tokens": 12, "temperature": 0}
    status, body = ask("/native/batch_generate", messages=talks, **shared)
    assert status == 200, body
    for talk, row in zip(talks, body["results"], strict=True):
        _, single = ask("/v1/chat/completions", messages=talk, **shared)
        message = single["choices"][0]["message"]
        assert row["text"] == (message["content"] or "")
        assert row.get("reasoning", "") == (message.get("reasoning_content") or "")


def test_a_bad_prompt_has_an_error_of_its_own(ask: Ask) -> None:
    prompts: list[Any] = ["fine", "", "x " * 90_000, "fine"]
    status, body = ask("/native/batch_generate", model="dense", prompts=prompts,
                       max_tokens=3, temperature=0)  # fmt: skip
    assert status == 200, body
    good, empty, long, again = body["results"]
    assert good == again
    assert good["error"] is None
    assert "empty" in empty["error"]
    assert "context" in long["error"]
    assert (long["text"], long["tokens"], long["finish_reason"]) == ("", [], None)


def test_a_bad_conversation_has_an_error_of_its_own(ask: Ask) -> None:
    good = [{"role": "user", "content": "hi"}]
    talks = [good, [{"role": "nobody", "content": ""}], [], good]
    status, body = ask("/native/batch_generate", model="dense", messages=talks,
                       max_tokens=2, temperature=0)  # fmt: skip
    assert status == 200, body
    errors = [row["error"] for row in body["results"]]
    assert [bool(error) for error in errors] == [False, True, True, False]
    assert errors[1].startswith("messages[1][0].role")


def test_prompts_are_not_read_before_their_turn(native_app: App) -> None:
    """Ten thousand times five hundred tools is minutes of work for one client."""
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {}}}
        for n in range(500)
    ]
    talk = [{"role": "user", "content": "a"}]
    body = {"model": "dense", "messages": [talk] * 9000, "tools": tools}
    started = time.process_time()
    request = parse_batch(body, RequestFacts("r", "", {}))
    assert len(request.readers) == 9000
    assert time.process_time() - started < 2


def test_a_field_that_nobody_reads_is_named(native_app: App) -> None:
    body = {"model": "dense", "prompts": ["x"], "max_tokens": 1, "tint": "blue"}
    url = f"{native_app.url}/native/batch_generate"
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.headers["x-litellm-mlx-ignored"] == "tint"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": 5}, "prompts"),
        ({"prompts": ["x"], "stream": True}, "stream"),
        ({"prompts": ["x"], "n": 2}, "n"),
        ({"prompts": ["x"], "messages": [[]]}, "prompts"),
        ({"prompts": ["x"], "include_metrics": True}, "include_metrics"),
        ({"prompts": ["x"], "logprobs": 2}, "logprobs"),
        ({"prompts": ["x"], "echo": True}, "echo"),
        ({"prompts": ["x"], "prompt": "y"}, "prompt"),
        ({"messages": [[]], "model": "nobody"}, "model"),
        ({"messages": [[]], "tools": 5}, "tools"),
        ({"prompts": ["x"], "adapter": "nobody"}, "adapter"),
        ({"prompts": ["x"], "max_tokens": 0}, "max_tokens"),
        ({"prompts": ["x"], "adapters": "none"}, "adapters"),
    ],
)
def test_what_cannot_be_done_is_refused(ask: Ask, more: Any, param: str) -> None:
    status, body = ask("/native/batch_generate", **{"model": "dense", **more})
    assert (status // 100, body["error"]["param"]) == (4, param)


def test_a_client_that_leaves_leaves_nothing_running(native_app: App) -> None:
    """Nor waiting: a batch holds places only while somebody waits for it."""
    host = native_app.url.removeprefix("http://")
    with held_gpu(native_app) as go:
        connection = http.client.HTTPConnection(host, timeout=60)
        with contextlib.closing(connection):
            body = {"model": "dense", "prompts": PROMPTS * 20, "max_tokens": 500}
            connection.request("POST", "/native/batch_generate", json.dumps(body))
            assert eventually(lambda: native_app.shared.admission.num_open > 0)
        go.set()
        assert eventually(lambda: native_app.shared.admission.num_open == 0)
        assert eventually(lambda: native_app.pool.num_leases == 0)


def test_a_call_that_is_no_json_is_text() -> None:
    """As in a whole chat: no tool may run on half its input."""
    broken = ToolCall("c", "f", '{"a": ')
    events: list[Event] = [
        TextDelta(0, "So: "),
        ToolCallStarted(0, 0, "c", "f"),
        ToolCallArguments(0, 0, broken.arguments),
        ToolCallEnded(0, 0, broken, is_broken=True),
        ChoiceFinished(0, "tool_calls", None, (5, 6)),
    ]
    found = _batch_answer(events)
    assert (found.tool_calls, found.finish_reason) == ((), "stop")
    assert found.text == f"So: f {broken.arguments}"
    assert found.token_ids == (5, 6)
