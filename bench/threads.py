"""Which requests only append to an earlier one: there a cache can save nearly all."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

_BILLING = re.compile(r"^-?x?-anthropic-billing-header:.*\n?", re.MULTILINE)
# OpenClaw 2026.9 ends each request with a user message that no later request has.
_PASSING = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"


def thread_places(bodies: Sequence[Json]) -> list[int]:
    """
    The place of each Chat request in its append-only thread, from 1.

    A request goes on with a thread if it has the same tools and all the messages of
    an earlier request, unchanged and in order, before its own. What the model thought
    is not compared, nor Claude Code's billing line, nor a message that is there for
    one request only.
    """
    histories = [_history(body) for body in bodies]
    places: list[int] = []
    for number, history in enumerate(histories):
        before = [i for i in range(number) if _is_continued(histories[i], history)]
        longest = max(before, key=lambda i: len(histories[i]), default=None)
        places.append(1 if longest is None else places[longest] + 1)
    return places


def _is_continued(history: Sequence[Any], later: Sequence[Any]) -> bool:
    return len(later) > len(history) and later[: len(history)] == history


def _history(body: Json) -> list[Any]:
    messages = list(body["messages"])
    while messages and _text(messages[-1]["content"]).startswith(_PASSING):
        messages.pop()
    return [body.get("tools") or [], *map(_said, messages)]


def _said(message: Json) -> Any:
    calls = [call["id"] for call in message.get("tool_calls") or ()]
    text = _text(message.get("content"))
    if message["role"] == "system":
        text = _BILLING.sub("", text)
    return message["role"], text.strip(), calls, message.get("tool_call_id")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or ())
