"""What the built-in model's card promises, by prompts that were written by hand."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App

FILE = Path(__file__).parents[1] / "fixtures" / "builtin_prompts.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_it_answers(app: App, case: dict[str, Any], thinking: bool) -> None:
    """The wanted words, or the wanted calls and no others; with thinking, or none."""
    body = {
        "model": "local", "messages": case["messages"], "tools": case["tools"],
        "temperature": 0, "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": thinking},
    }  # fmt: skip
    url = f"{app.url}/v1/chat/completions"
    (choice,) = httpx.post(url, json=body, timeout=120).json()["choices"]
    message, wanted = choice["message"], case["wanted"]
    assert bool(message.get("reasoning_content")) is thinking
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if isinstance(wanted, str):
        assert choice["finish_reason"] == "stop"
        assert wanted in message["content"]
        assert calls == []
    else:
        assert choice["finish_reason"] == "tool_calls"
        given = [(call["name"], json.loads(call["arguments"])) for call in calls]
        assert given == [(call["name"], call["arguments"]) for call in wanted]
