"""Why a prompt was not warm: the cause that is named for each that was planted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.servers import running_sidecar

WORDS = [f"w{n}" for n in range(400)]
Message = dict[str, Any]


def text(seed: int, length: int = 90) -> str:
    return " ".join(WORDS[(seed * 37 + 11 * n) % 400] for n in range(length))


def say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def talk(num_turns: int, seed: int = 0) -> list[Message]:
    """A history as a client of another day sends it, ending with a user's message."""
    messages = [say("system", f"You are {text(seed)}.")]
    for turn in range(num_turns):
        messages += [say("user", text(seed + 2 * turn + 1, 60))]
        messages += [say("assistant", text(seed + 2 * turn + 2, 60))]
    return [*messages, say("user", f"And then {seed}?")]


class Agent:
    """A client with a session of its own."""

    def __init__(self, app: App, name: str, model: str = "local") -> None:
        self.app, self.name, self.model = app, name, model

    def ask(self, messages: list[Message], **more: Any) -> dict[str, Any]:
        """The row of a request, as the page has it."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": 4,
            "temperature": 0,
            "session_id": self.name,
            **more,
        }
        answer = httpx.post(
            f"{self.app.url}/v1/chat/completions", json=body, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return newest(self.app)


def newest(app: App) -> dict[str, Any]:
    state = httpx.get(f"{app.url}/admin/state", timeout=60).json()
    row: dict[str, Any] = state["ended"][0]
    return row


def cause(row: dict[str, Any]) -> str:
    warmth = row["warmth"]
    is_sound = warmth["lost"] <= row["prompt_tokens"] - row["cached_tokens"]
    assert is_sound, row
    return str(warmth["cause"])


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def app(
    request: pytest.FixtureRequest, model_folder: Callable[[str], Path]
) -> Iterator[App]:
    folder = str(model_folder(request.param))
    with running_sidecar({"MODEL_PATH": folder}) as served:
        yield served


def test_a_conversation_that_goes_on_is_warm(app: App) -> None:
    agent, history = Agent(app, "on"), talk(0)
    assert cause(agent.ask(history)) in ("first_seen", "other_prefix")
    history += [say("assistant", "x"), say("user", text(5))]
    row = agent.ask(history)
    assert cause(row) == ""
    assert row["warmth"]["lost"] == 0
    assert row["cached_tokens"] > 50
