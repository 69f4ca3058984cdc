"""A client that asks is told how far the prefill of its prompt is."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.servers import running_sidecar

WORDS = " ".join(f"word{number}" for number in range(200))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}]},
    "/v1/completions": {"prompt": WORDS},
    "/v1/messages": {"messages": [{"role": "user", "content": WORDS}]},
    "/v1/responses": {"input": WORDS},
}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with running_sidecar({"PREFILL_STEP_SIZE": "128"}) as running:
        yield running


def lines(app: App, route: str, **more: Any) -> list[str]:
    length = "max_output_tokens" if "responses" in route else "max_tokens"
    body = {**BODIES[route], length: 2, "stream": True, **more}
    with httpx.stream("POST", app.url + route, json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        return list(answer.iter_lines())


def test_chat_has_chunks_as_llama_cpp_words_them(app: App) -> None:
    said = lines(app, "/v1/chat/completions", return_progress=True)
    chunks = [json.loads(line[6:]) for line in said if line.startswith("data: {")]
    told = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
    assert len(told) >= 3
    done = [one["processed"] for one in told]
    assert done == sorted(set(done))
    assert done[0] == told[0]["cache"]
    assert done[-1] >= told[-1]["total"] - 1
    assert told[0]["seconds_left"] is None
    assert all(one["seconds_left"] >= 0 for one in told[1:])
    assert all(one["total"] == told[0]["total"] > 400 for one in told)
    assert all(one["time_ms"] >= 0 for one in told)
    assert all(c["choices"][0]["delta"] == {} for c in chunks if "prompt_progress" in c)


@pytest.mark.parametrize("route", [one for one in BODIES if "chat" not in one])
def test_other_routes_have_comments(app: App, route: str) -> None:
    """Which no client takes for an event."""
    said = lines(app, route, return_progress=True)
    told = [json.loads(line[10:]) for line in said if line.startswith(": prefill {")]
    assert told
    assert told[-1]["processed"] >= told[-1]["total"] - 1


@pytest.mark.parametrize("route", BODIES)
def test_nobody_is_told_who_did_not_ask(app: App, route: str) -> None:
    said = "\n".join(lines(app, route))
    assert "prefill" not in said
    assert "prompt_progress" not in said
