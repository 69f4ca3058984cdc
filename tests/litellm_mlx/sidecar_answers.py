"""What the fake sidecar says: chunks, whole answers, refusals, and scripts of them."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
# A chunk to send, bytes to send as they are, seconds to wait.
Step = Json | bytes | float

DONE = b"data: [DONE]\n\n"
USAGE: Json = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 7},
}


@dataclass
class Script:
    """
    How a request for one model is answered.

    Args:
        steps: the stream; without a final DONE the connection just closes.
        problem: a refusal in place of an answer, with `status`.
        wait_s: silence before the headers. gate: the same until it is set.
        body: the whole answer in non-stream mode, None for the default one.
        is_cut: close the socket without the end of the chunked body.
        is_cancelled_by_id: end the stream at a cancel, not only at a closed socket.
    """

    steps: list[Step] = field(default_factory=list)
    status: int = 200
    problem: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    gate: threading.Event | None = None
    body: Json | None = None
    is_cut: bool = False
    is_cancelled_by_id: bool = False


def chunk(
    model: str, delta: Json | None, finish: str | None = None, **more: Any
) -> Json:
    """One OpenAI chunk; a delta of None makes a chunk without choices."""
    choice = {"index": more.pop("index", 0), "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": model,
        "choices": [] if delta is None else [choice],
        **more,
    }


def tool_delta(index: int, call_id: str, name: str, arguments: str) -> Json:
    """A delta with one whole tool call."""
    function = {"name": name, "arguments": arguments}
    call = {"index": index, "id": call_id, "type": "function", "function": function}
    return {"tool_calls": [call]}


def rich_answer(model: str = "m") -> list[Step]:
    """Reasoning, text and two tool calls; finish, then usage, as servers send them."""
    return [
        chunk(model, {"role": "assistant", "content": ""}),
        chunk(model, {"reasoning_content": "Let me "}),
        chunk(model, {"reasoning_content": "think."}),
        chunk(model, {"content": "I will "}),
        chunk(model, {"content": "look."}),
        chunk(model, tool_delta(0, "call_a", "get_weather", '{"city":"Paris"}')),
        chunk(model, tool_delta(1, "call_b", "get_time", '{"tz":"CET"}')),
        chunk(model, {}, "tool_calls"),
        chunk(model, None, usage=USAGE),
        DONE,
    ]


def text_answer(model: str, text: str) -> list[Step]:
    """A short answer of one text."""
    return [
        chunk(model, {"role": "assistant", "content": ""}),
        chunk(model, {"content": text}),
        chunk(model, None, usage=USAGE),
        chunk(model, {}, "stop"),
        DONE,
    ]


def slow_answer(model: str, num_deltas: int = 200) -> list[Step]:
    """An answer that takes 50 ms for each delta."""
    steps: list[Step] = [chunk(model, {"role": "assistant", "content": ""})]
    for _ in range(num_deltas):
        steps += [chunk(model, {"content": "word "}), 0.05]
    return [*steps, chunk(model, {}, "stop"), DONE]


def problem(status: int, code: str, text: str, **headers: str) -> Script:
    """A refusal with the sidecar's problem body."""
    body = {
        "type": "about:blank",
        "title": "Refused",
        "status": status,
        "detail": text,
        "instance": "/v1/chat/completions",
        "request_id": "r1",
        "error_code": code,
        "error": {"message": text, "type": code, "code": code, "param": None},
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Script(status=status, problem=body, headers=named)


def whole_answer(model: str) -> Json:
    """The rich answer in one piece."""
    calls = [
        tool_delta(0, "call_a", "get_weather", '{"city":"Paris"}')["tool_calls"][0],
        tool_delta(1, "call_b", "get_time", '{"tz":"CET"}')["tool_calls"][0],
    ]
    message = {
        "role": "assistant",
        "content": "I will look.",
        "reasoning_content": "Let me think.",
        "tool_calls": calls,
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": model,
        "choices": [choice],
        "usage": USAGE,
    }
