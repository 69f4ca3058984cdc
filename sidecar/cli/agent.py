"""
An agent for the probe: system prompt, tools, tasks, and tool results it makes up.

What it sends next follows from what it was really answered: calls get results, an
answer gets the next task. It does to a conversation what clients do: it drops the
thinking and writes the arguments of calls anew, compactly.
"""

import copy
import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.cli.server import Json, Reply, Server


@dataclass(frozen=True, slots=True)
class Turn:
    """
    One request and what became of it.

    Args:
        num_messages: messages in its prompt. is_heard: the answer was not empty.
        is_cut: the answer ends in a call whose arguments are no JSON.
    """

    label: str
    prompt_len: int
    cached_len: int
    completion_len: int
    ttft_s: float
    num_messages: int
    is_heard: bool
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Volatile:
    """What in the agent's prompt may change with each request."""

    clock: str = "2026-11-20T09:33:00Z"
    message_id: str = "5f01c2"
    order: str = "Do NOT touch prod."


class Agent:
    """
    One conversation with a server.

    Args:
        asks: what goes into each request besides its messages.
        name: tells this agent's prompts from all others', from their first words on.
        task: what its user asks first; tells its thread from others of its session.
    """

    def __init__(self, server: Server, asks: Json, name: str, task: str) -> None:
        self._server = server
        self._asks = asks
        self._task = task
        self.name = name
        self._num_tasks = 1
        self.messages: list[Json] = []
        self.set_volatile(Volatile())

    def set_volatile(self, values: Volatile) -> None:
        """Write the system prompt and the first task anew with these values."""
        self.messages[:2] = [
            {"role": "system", "content": system_text(self.name, values)},
            {"role": "user", "content": _first_task(self._task, values)},
        ]

    def fork(self) -> "Agent":
        """Another conversation that so far went the same way."""
        other = copy.copy(self)
        other.messages = list(self.messages)
        return other

    def say(self, text: str) -> None:
        """Give a task; open calls are answered first."""
        self._answer_calls()
        self._say(text)

    def show(self, text: str, part: Json) -> None:
        """Give a task with a picture; open calls are answered first."""
        self._answer_calls()
        self._num_tasks += 1
        parts = [{"type": "text", "text": text}, part]
        self.messages.append({"role": "user", "content": parts})

    def step(self, label: str) -> Turn:
        """Send the next request and keep its answer."""
        if self.messages[-1]["role"] == "assistant":
            self._go_on()
        return self.ask(label)

    def ask(self, label: str) -> Turn:
        """Send the messages as they are and keep the answer."""
        reply = self._server.chat(
            {**self._asks, "messages": self.messages, "tools": TOOLS}
        )
        num_messages = len(self.messages)
        self.messages.append(_echo(reply))
        return Turn(
            label,
            reply.prompt_len,
            reply.cached_len,
            reply.completion_len,
            reply.ttft_s,
            num_messages,
            bool(reply.message["content"].strip() or reply.message.get("tool_calls")),
            _ends_in_a_cut_call(reply.message),
        )

    def _go_on(self) -> None:
        self._answer_calls()
        if self.messages[-1]["role"] == "assistant":
            self._say(_task(self._num_tasks))

    def _answer_calls(self) -> None:
        for call in self.messages[-1].get("tool_calls") or ():
            result = _result(call["function"]["name"], call["function"]["arguments"])
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": result}
            )

    def _say(self, text: str) -> None:
        self._num_tasks += 1
        self.messages.append({"role": "user", "content": text})


def new_name(role: str) -> str:
    """A name no other run has, so that nothing of its prompts is stored yet."""
    return f"{role} {secrets.token_hex(4)}"


def num_words(messages: Sequence[Json]) -> int:
    """Words in what the client said: never more than their tokens."""
    return sum(len(m["content"].split()) for m in messages if m["role"] != "assistant")


def system_text(name: str, values: Volatile) -> str:
    """The system prompt."""
    head, tail = system_around_order(name, values)
    return f"{head}{values.order}{tail}"


def system_around_order(name: str, values: Volatile) -> tuple[str, str]:
    """The system prompt before and behind the order about production."""
    first, last = _list(_RULES[:6]), _list(_RULES[6:])
    metadata = json.dumps({"channel": "probe", "message_id": values.message_id})
    head = (
        f"You are {name}, a careful coding agent in a terminal.\n\n"
        f"# How to work\n\n{first}\n\n# Now\n\n{metadata}\n"
        f"Current time: {values.clock}. "
    )
    return head, f"\n\n# How to answer\n\n{last}\n"


def _list(rules: Sequence[str]) -> str:
    return "\n".join(f"- {rule}" for rule in rules)


def _first_task(task: str, values: Volatile) -> str:
    metadata = json.dumps({"sender": "probe", "message_id": f"{values.message_id}-1"})
    return f"{metadata}\n\n{task}"


def _task(number: int) -> str:
    if number % 2:
        return f"Run `wc -l part{number}.txt`"
    return f"Read part{number}.txt"


def _result(name: str, arguments: str) -> str:
    """Twelve lines, always the same for the same call."""
    words = random.Random(f"{name} {arguments}")
    lines = (" ".join(words.choices(WORDS, k=6)) for _ in range(12))
    return "\n".join(f"{number}: {line}" for number, line in enumerate(lines, 1))


def _echo(reply: Reply) -> Json:
    message = copy.deepcopy(reply.message)
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = _compact(call["function"]["arguments"])
    return message


def _ends_in_a_cut_call(message: Json) -> bool:
    calls = message.get("tool_calls")
    if not calls:
        return False
    try:
        json.loads(calls[-1]["function"]["arguments"])
    except ValueError:
        return True
    return False


def _compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"))
    except ValueError:
        return arguments


def _tool(name: str, description: str, **arguments: str) -> Json:
    properties: dict[str, Any] = {
        key: {"type": "string", "description": text} for key, text in arguments.items()
    }
    function = {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
        },
    }
    return {"type": "function", "function": function}


TOOLS = [
    _tool("read", "Read the contents of a file.", path="The file to read"),
    _tool(
        "write",
        "Write a file, replacing what is there.",
        path="The file to write",
        content="All of its new text",
    ),
    _tool("bash", "Execute a bash command.", command="The command line"),
]

_RULES = (
    "Read a file before you change it, and change no more than you were asked to.",
    "Prefer the tools you are given to guesses about what a file may hold.",
    "Run the tests that exist after each change and report what they print.",
    "Never invent the output of a command; run it and quote the lines that matter.",
    "Keep answers short: a sentence or two, then the evidence.",
    "Ask when the task can be read in two ways and the difference is costly.",
    "Leave formatting, names and comments of the surrounding code as they are.",
    "Do not commit, push or delete anything unless the task says so.",
    "Say plainly when something failed and what you tried.",
    "Paths are relative to the working directory, which is the project's root.",
)
WORDS = (
    "buffer",
    "commit",
    "deploy",
    "engine",
    "filter",
    "gather",
    "handle",
    "import",
    "kernel",
    "listen",
    "module",
    "number",
    "output",
    "parser",
    "queue",
    "record",
)
