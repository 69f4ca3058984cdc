"""Ten recorded agents, shortened, and changes to a conversation with known causes."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from testkit.traces import load_trace

Json = dict[str, Any]

AGENTS = (
    "claude-2.1.157-print",
    "claude-2.1.157-terminal",
    "claude-2.1.328-print",
    "claude-2.1.75-print",
    "openclaw-2026.6.11-group",
    "openclaw-2026.9.6-local",
    "opencode-1.18.33",
    "pi-0.73.1",
    "pi-0.87.1",
    "qwen-0.24.4",
)
_MAX_CHARS, _MAX_TOOLS, _MAX_MESSAGES = 240, 5, 12
LAST = " ".join(f"Do this {n} times in all of the {n * 7} places." for n in range(12))
WHEN = "Current time: Monday, March {day}th, 2026 - 10:0{day} AM (UTC)"


@dataclass(frozen=True, slots=True)
class Talk:
    """One request of an agent, short enough for a tiny model."""

    path: str
    body: Json

    @property
    def messages(self) -> list[Json]:
        found: list[Json] = self.body["messages"]
        return found

    def named(self, session: str) -> "Talk":
        """The same, of a session."""
        user_id = f"user_1_account__session_{session}"
        fields = {"session_id": session, "metadata": {"user_id": user_id}}
        return Talk(self.path, {**copy.deepcopy(self.body), **fields})


def recorded(agent: str) -> Talk:
    """A request of an agent that has an answer of the model's in its history."""
    found = [e for e in load_trace(agent) if e.num_answers >= 1]
    exchange = max(found, key=lambda e: min(e.num_answers, 3))
    body = exchange.body
    messages = [_short_message(m) for m in body["messages"][:_MAX_MESSAGES]]
    while messages[-1]["role"] == "assistant":
        messages.pop()
    add_text(messages[-1], LAST)
    kept: Json = {"model": "local", "messages": messages, "max_tokens": 4}
    if system := body.get("system"):
        kept["system"] = _short(system)
    if tools := body.get("tools"):
        kept["tools"] = [_short_tool(tool) for tool in tools[:_MAX_TOOLS]]
    return Talk(exchange.path.partition("?")[0], kept)


def _short(content: Any) -> Any:
    if isinstance(content, str):
        return content[:_MAX_CHARS]
    if isinstance(content, list):
        return [_short(block) for block in content]
    if isinstance(content, dict):
        return {
            name: _short(value) if name in ("text", "content") else value
            for name, value in content.items()
            if name not in ("signature", "cache_control")
        }
    return content


def _short_message(message: Json) -> Json:
    return {**message, "content": _short(message["content"])}


def _short_tool(tool: Json) -> Json:
    own = copy.deepcopy(tool)
    inner = own.get("function", own)
    inner["description"] = inner.get("description", "")[:80]
    schema = "input_schema" if "input_schema" in inner else "parameters"
    inner[schema] = {"type": "object", "properties": {"x": {"type": "string"}}}
    return own


def add_text(message: Json, text: str) -> None:
    """Put a text at a message's end."""
    content = message["content"]
    if isinstance(content, list):
        content.append({"type": "text", "text": text})
    else:
        message["content"] = f"{content}\n{text}"


def system_of(talk: Talk) -> str:
    """What begins each prompt, as text."""
    return json.dumps(talk.body.get("system") or talk.messages[0]["content"])


def new_system(talk: Talk, text: str) -> None:
    """Begin the system text with something else."""
    if "system" in talk.body:
        system = talk.body["system"]
        if isinstance(system, str):
            talk.body["system"] = f"{text} {system}"
        else:
            system[-1]["text"] = f"{text} {system[-1]['text']}"
        return
    first = talk.messages[0]
    if isinstance(first["content"], str):
        first["content"] = f"{text} {first['content']}"
    else:
        first["content"][0]["text"] = f"{text} {first['content'][0]['text']}"


def other_word(talk: Talk) -> None:
    """A word of the system text that no rule knows."""
    new_system(talk, "Build 7 of the harness.")


def tool_gone(talk: Talk) -> None:
    """One tool less."""
    del talk.body["tools"][-1]


def tools_moved(talk: Talk) -> None:
    """The same tools in another order."""
    talk.body["tools"].reverse()


def tool_changed(talk: Talk) -> None:
    """One tool is described in other words."""
    inner = talk.body["tools"][0].get("function", talk.body["tools"][0])
    inner["description"] = "Does something else."


def last_edited(talk: Talk) -> None:
    """The user says the last message in other words."""
    last = talk.messages[-1]
    if isinstance(last["content"], list):
        last["content"][-1]["text"] = f"No: {LAST}"
    else:
        last["content"] = f"No: {last['content']}"


def went_back(talk: Talk) -> None:
    """The client goes on from an earlier message: all that it has is known."""
    first = next(i for i, m in enumerate(talk.messages) if m["role"] == "assistant")
    del talk.messages[first:]


def compacted(talk: Talk) -> None:
    """The client has made one message of the history, and keeps the last one."""
    start = int(talk.messages[0]["role"] in ("system", "developer"))
    summary = {"role": "user", "content": "Summary: much was done. " * 12}
    talk.messages[start:-1] = [summary, {"role": "assistant", "content": "Go on."}]


Change = Callable[[Talk], None]
CHANGES: dict[str, tuple[str, Change]] = {
    "other_word": ("text", other_word),
    "tool_gone": ("tools", tool_gone),
    "tools_moved": ("tools", tools_moved),
    "tool_changed": ("tools", tool_changed),
    "last_edited": ("edited", last_edited),
    "went_back": ("", went_back),
    "compacted": ("compacted", compacted),
}
