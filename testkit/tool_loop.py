"""An agent in a tool loop: it strips thinking and re-serialises arguments."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx

from testkit.scripted import Answer, Call, Prompt, Switch, render

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "content": {"type": "string"},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                },
            },
        },
    }
    for name in ("read", "write")
]
_WORDS = [
    "the",
    "file",
    "of",
    "a",
    "model",
    "and",
    "its",
    "cache",
    "are",
    "read",
    "by",
    "one",
    "server",
    "for",
    "each",
    "turn",
]


def words(seed: object, count: int) -> str:
    """That many words, not the same twice."""
    chance = random.Random(f"words {seed}")
    return " ".join(chance.choice(_WORDS) + chance.choice("  ,.") for _ in range(count))


@dataclass(frozen=True)
class Turn:
    """Tokens of one request."""

    prompt: int
    cached: int
    completion: int

    @property
    def total(self) -> int:
        """What is in the KV after it."""
        return self.prompt + self.completion


@dataclass
class Agent:
    """
    One thread of one session.

    Args:
        switch: the script of the server. system: its system prompt.
    """

    http: httpx.Client
    switch: Switch
    session: str
    system: str
    task: str
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.task},
        ]

    def call(self, num_words: int, result_words: int) -> Turn:
        """A turn that ends in a call with so many words of content; its result."""
        number = len(self.messages)
        arguments = {
            "path": f"/p/{number}.py",
            "content": words((self.task, number), num_words),
            "lines": [1, number],
        }
        calls = (Call("write", arguments),)
        thought = f"I should write file {number} next.\n\nThen test it."
        text = "Let me do it.\n" if number % 3 else ""
        turn = self._send(Answer(thought, text, calls))
        result = words(("result", self.task, number), result_words)
        for call in self.messages[-1]["tool_calls"]:
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": result}
            )
        return turn

    def say(self, num_words: int) -> Turn:
        """A turn that ends in text."""
        return self._send(Answer("Done.", words(("say", self.task), num_words)))

    def _send(self, answer: Answer) -> Turn:
        def script(prompt: Prompt) -> str:
            return render(answer, prompt)

        self.switch.script = script
        response = self.http.post(
            "/v1/chat/completions",
            json={
                "messages": self.messages, "tools": TOOLS, "session_id": self.session,
                "max_tokens": 2000,
            },
        )  # fmt: skip
        assert response.status_code == 200, response.text
        body = response.json()
        message = body["choices"][0]["message"]
        assert len(message.get("tool_calls") or ()) == len(answer.calls)
        self.messages.append(_echo(message))
        usage = body["usage"]
        turn = Turn(
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
        )
        self.turns.append(turn)
        return turn


def _echo(message: dict[str, Any]) -> dict[str, Any]:
    """As an agent sends it back: no thinking, arguments serialised its own way."""
    echo: dict[str, Any] = {
        "role": "assistant",
        "content": (message.get("content") or "").strip() or None,
    }
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        compact = json.dumps(arguments, separators=(",", ":"), sort_keys=True)
        calls.append({**call, "function": {**call["function"], "arguments": compact}})
    if calls:
        echo["tool_calls"] = calls
    return echo
