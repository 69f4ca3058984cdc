"""One streamed chat answer: the message, and when its first piece came."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Streamed:
    """
    A complete answer.

    Args:
        message: as an agent would put it together.
        ttft_s: from the send to the first piece of thinking, text or a call.
        prompt_len, cached_len: tokens, as the server counts them.
    """

    message: Json
    ttft_s: float
    prompt_len: int
    cached_len: int


def stream_chat(http: httpx.Client, body: Json) -> Streamed:
    """
    Ask and read to the end.

    Raises:
        httpx.HTTPStatusError: the server refused.
    """
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(asked).encode()
    first = 0.0
    pieces: list[Json] = []
    usage: Json = {}
    started = time.perf_counter()
    with http.stream("POST", "/v1/chat/completions", content=content) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if _says_something(choice["delta"]):
                    first = first or time.perf_counter()
                    pieces.append(choice["delta"])
    cached = usage.get("prompt_tokens_details") or {}
    return Streamed(
        _joined(pieces),
        (first or time.perf_counter()) - started,
        usage["prompt_tokens"],
        cached.get("cached_tokens", 0),
    )


def _says_something(delta: Json) -> bool:
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(name) for name in names)


def _joined(pieces: list[Json]) -> Json:
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for part in piece.get("tool_calls") or ():
            call = calls.setdefault(
                part["index"], {"id": "", "name": "", "arguments": ""}
            )
            call["id"] = part.get("id") or call["id"]
            function = part.get("function") or {}
            call["name"] = function.get("name") or call["name"]
            call["arguments"] += function.get("arguments") or ""
    tool_calls = [
        {
            "id": call["id"],
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in calls.values()
    ]
    text = "".join(piece.get("content") or "" for piece in pieces)
    return {"role": "assistant", "content": text, "tool_calls": tool_calls}
