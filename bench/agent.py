"""A coding agent's side of a long conversation, as real ones behave."""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Json = Mapping[str, Any]

_SYSTEM_TOKENS = 700
_RULE = "You are an agent that works on files with tools."


class Agent:
    """
    Asks for one file after another and sends what the tools give back.

    It forgets what the model thought, writes the arguments of calls in its own way,
    and, if `is_volatile`, puts a clock and the id of the newest message behind its
    instructions, in front of its tools and all of the history.

    Args:
        tokenizer_file: the model's; sets what a length in tokens means.
        seed: other seeds make other texts, from the first word on.
        result_tokens: about the length of a tool's result.
    """

    def __init__(
        self, tokenizer_file: Path, seed: int, result_tokens: int, *, is_volatile: bool
    ) -> None:
        self._words = _Words(tokenizer_file, seed)
        self._result_tokens = result_tokens
        self._is_volatile = is_volatile
        self._rules = f"{self._words.text(8)}\n{_RULE}\n"
        self._rules += self._words.text(_SYSTEM_TOKENS)
        self._num_requests = 0
        self._num_files = 0
        self._messages: list[Json] = []
        self._ask()

    def body(self) -> dict[str, Any]:
        """The next request."""
        self._num_requests += 1
        system = {"role": "system", "content": self._rules + self._state()}
        return {"messages": [system, *self._messages], "tools": _TOOLS}

    def hear(self, answer: Json) -> None:
        """Take an answer and get the next request ready."""
        calls = [_rewritten(call) for call in answer.get("tool_calls") or ()]
        said = {"role": "assistant", "content": answer.get("content") or ""}
        self._messages.append({**said, "tool_calls": calls} if calls else said)
        for call in calls:
            result = self._words.text(self._result_tokens // len(calls))
            self._messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": result}
            )
        if not calls:
            self._ask()

    def _ask(self) -> None:
        self._num_files += 1
        ask = f"Read notes{self._num_files}.txt"
        self._messages.append({"role": "user", "content": ask})

    def _state(self) -> str:
        if not self._is_volatile:
            return ""
        minute, message = self._num_requests, 4000 + self._num_requests
        return (
            f"\n\nCurrent time: 2026-11-20T10:{minute:02}:00Z"
            f'\n{{"chat_id": "c-7", "message_id": "{message}"}}'
        )


class _Words:
    """Random words of the model's vocabulary, one token each."""

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        vocabulary = Tokenizer.from_file(str(tokenizer_file)).get_vocab()
        self._words = sorted(
            token.removeprefix("Ġ")
            for token in vocabulary
            if token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha()
        )
        self._random = random.Random(seed)

    def text(self, num_tokens: int) -> str:
        return " ".join(self._random.choices(self._words, k=num_tokens))


def _rewritten(call: Json) -> Json:
    """The call as an agent sends it back: parsed, and written again."""
    function = call["function"]
    arguments = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools() -> Iterator[Json]:
    text = {"type": "string"}
    for name, does, names in (
        ("read_file", "Read a file and return its text.", ("path",)),
        ("write_file", "Write a text to a file.", ("path", "content")),
        ("edit_file", "Replace a text in a file.", ("path", "old", "new")),
        ("run", "Run a shell command and return what it prints.", ("command",)),
    ):
        parameters = {
            "type": "object",
            "properties": dict.fromkeys(names, text),
            "required": list(names),
        }
        function = {"name": name, "description": does, "parameters": parameters}
        yield {"type": "function", "function": function}


_TOOLS = list(_tools())
