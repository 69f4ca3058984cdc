"""Recorded agent traffic: what agents sent, and what they were answered."""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.scripted import Answer, Call, Json, Prompt, render

TRACES = Path(__file__).parents[1] / "tests/fixtures" / "traces"
_NOT_SENT = (
    "host",
    "connection",
    "content-length",
    "accept-encoding",
    "transfer-encod",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """
    One recorded request and its answer.

    Args:
        path: with the query.
        call_ids: the ids under which the client was given the answer's calls.
    """

    seq: int
    path: str
    headers: Json
    body: Json
    answer: Answer
    call_ids: tuple[str, ...]

    @property
    def is_anthropic(self) -> bool:
        """Whether it speaks the Messages dialect, else Chat."""
        return "/messages" in self.path

    @property
    def hides_thinking(self) -> bool:
        """Whether the client asks not to be shown the thinking."""
        return (self.body.get("thinking") or {}).get("display") == "omitted"

    @property
    def tool_names(self) -> frozenset[str]:
        """The offered functions."""
        tools = self.body.get("tools") or []
        return frozenset(tool.get("function", tool)["name"] for tool in tools)

    @property
    def num_answers(self) -> int:
        """Turns the assistant has had."""
        return sum(message["role"] == "assistant" for message in self.body["messages"])

    @property
    def tail(self) -> str:
        """All that the client said since the assistant's last turn."""
        texts: list[str] = []
        for message in self.body["messages"]:
            is_answer = message["role"] == "assistant"
            texts = [] if is_answer else [*texts, *_texts(message["content"])]
        return "\n".join(texts)

    @property
    def text(self) -> str:
        """All that was said."""
        contents = [message["content"] for message in self.body["messages"]]
        return "\n".join(text for content in contents for text in _texts(content))


def load_trace(name: str) -> tuple[Exchange, ...]:
    """The generating requests of `tests/fixtures/traces/<name>.jsonl.gz`, in order."""
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    echoes = dict(echo for row in rows for echo in _echoes(row["body"]))
    answered = [row for row in rows if isinstance(row["answer"], dict)]
    return tuple(_exchange(row, echoes) for row in answered)


def _echoes(body: Json) -> Iterator[tuple[str, Json]]:
    """The id and the arguments of each call in a history."""
    for message in body.get("messages") or ():
        for call in message.get("tool_calls") or ():
            yield call["id"], json.loads(call["function"]["arguments"])
        for part in message["content"] or ():
            if isinstance(part, dict) and part["type"] == "tool_use":
                yield part["id"], part["input"]


def _exchange(row: Json, echoes: Mapping[str, Json]) -> Exchange:
    answer = row["answer"]
    ids = answer["ids"] or [""] * len(answer["calls"])
    calls = tuple(
        Call(name, _as_echoed(arguments, echoes.get(call_id, {})))
        for call_id, (name, arguments) in zip(ids, answer["calls"], strict=True)
    )
    headers = {
        name: value
        for name, value in row["headers"].items()
        if value != "<secret>" and not name.lower().startswith(_NOT_SENT)
    }
    return Exchange(
        row["seq"],
        row["path"],
        headers,
        row["body"],
        Answer(answer["reasoning"], answer["text"], calls),
        tuple(answer["ids"] or ()),
    )


def _as_echoed(arguments: Json, echo: Json) -> Json:
    """
    What was said, in the words of its echo; without what the client added.

    Prose was replaced in Claude Code's requests, not in what it was answered.
    """
    return {name: echo.get(name, value) for name, value in arguments.items()}


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for part in content or ():
        yield from _texts(part.get("text") or part.get("content"))


class ReplayScript:
    """
    Gives each prompt the answer that was recorded for its request.

    A prompt belongs to the request with the same tools and as many answers so far
    whose newest texts share most words with its own, and then whose texts in all do:
    what the server changes in a prompt (volatile values, notes) must not matter.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges

    def __call__(self, prompt: Prompt) -> str:
        """Find the request and write its answer."""
        return render(self.find(prompt).answer, prompt)

    def find(self, prompt: Prompt) -> Exchange:
        """
        The request this prompt was made from.

        Raises:
            LookupError: no recorded request has these tools and this many answers.
        """
        names = frozenset(tool["name"] for tool in prompt.tools)
        key = (names, prompt.num_answers)
        said = "\n".join(turn.text for turn in prompt.turns)
        fitting = [e for e in self._exchanges if (e.tool_names, e.num_answers) == key]
        if not fitting:
            raise LookupError(
                f"no recorded request has {len(names)} such tools and {key[1]} answers"
            )
        return max(
            fitting,
            key=lambda e: (_likeness(e.tail, prompt.tail), _likeness(e.text, said)),
        )


def _likeness(one: str, other: str) -> float:
    """Share of the words of both that both have."""
    words, others = (set(re.findall(r"\w+", text)) for text in (one, other))
    return len(words & others) / max(1, len(words | others))
