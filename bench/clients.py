"""
A streaming client that costs little: one thread, raw sockets, parsing afterwards.

While a run goes on it only notes what bytes came when, so that it takes next to
nothing of the processor that the measured server needs.
"""

import bisect
import json
import re
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]

_DEADLINE_S = 600.0
# All servers write an event in one piece, so chunk sizes stand between events only.
_EVENT = re.compile(rb"^data: (\{.*\})\r?\n\r?\n", re.MULTILINE)
_DONE = b"data: [DONE]"


class StreamFailed(Exception):
    """A server answered something else than a complete stream."""


@dataclass(frozen=True, slots=True)
class Answer:
    """
    One streamed completion. Times are of `time.perf_counter`.

    Args:
        started: just before the connection was opened.
        first, last: arrival of the first and the last piece of text.
        num_prompt, num_cached, num_generated: tokens, as the server counts them.
        times: arrival of each piece of text.
    """

    started: float
    first: float
    last: float
    text: str
    num_prompt: int
    num_cached: int
    num_generated: int
    times: tuple[float, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Seconds from the send to the first text."""
        return self.first - self.started

    @property
    def decode_tps(self) -> float:
        """Tokens a second after the first; 0 if all text came in one piece."""
        seconds = self.last - self.first
        return (self.num_generated - 1) / seconds if seconds else 0.0


@dataclass
class _Line:
    """What came over one connection, and when each piece ended."""

    connection: socket.socket
    started: float
    data: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def take(self) -> bool:
        """Note what arrived; False at the end."""
        piece = self.connection.recv(1 << 16)
        if piece:
            self.times.append(time.perf_counter())
            self.data += piece
            self.ends.append(len(self.data))
        return bool(piece)


def complete(port: int, prompts: list[str], max_tokens: int) -> list[Answer]:
    """
    Stream greedy completions of all prompts at once; answers in their order.

    Raises:
        StreamFailed: not a stream, or not a whole one.
    """
    bodies = [{"prompt": prompt} for prompt in prompts]
    return ask_all(port, "/v1/completions", bodies, max_tokens)


def chat(
    port: int, talks: list[list[Json]], max_tokens: int, model: str
) -> list[Answer]:
    """
    Stream greedy chat answers to all lists of messages at once; thinking counts.

    Raises:
        StreamFailed: not a stream, or not a whole one.
    """
    bodies = [{"messages": talk, "model": model} for talk in talks]
    return ask_all(port, "/v1/chat/completions", bodies, max_tokens)


def ask_all(
    port: int, path: str, bodies: Sequence[Json], max_tokens: int
) -> list[Answer]:
    """
    Stream the answers to all bodies at once; greedy where they do not say otherwise.

    Raises:
        StreamFailed: not a stream, or not a whole one.
    """
    lines: list[_Line] = []
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            line = _send(port, _request(port, path, body, max_tokens))
            selector.register(line.connection, selectors.EVENT_READ, line)
            lines.append(line)
        _receive(selector)
    return [_parse(line) for line in lines]


def _request(port: int, path: str, asked: Json, max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "temperature": 0.0,
            **asked,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Authorization: Bearer any\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _send(port: int, request: bytes) -> _Line:
    started = time.perf_counter()
    connection = socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(request)
    return _Line(connection, started)


def _receive(selector: selectors.BaseSelector) -> None:
    deadline = time.perf_counter() + _DEADLINE_S
    while selector.get_map():
        ready = selector.select(1.0)
        for key, _ in ready:
            if not key.data.take():
                selector.unregister(key.fileobj)
                key.data.connection.close()
        if not ready and time.perf_counter() > deadline:
            raise StreamFailed(f"no end within {_DEADLINE_S:g} seconds")


def _parse(line: _Line) -> Answer:
    data = bytes(line.data)
    if not re.match(rb"HTTP/1\.[01] 200 ", data) or _DONE not in data:
        raise StreamFailed(data[:500].decode(errors="replace"))
    text: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    for match in _EVENT.finditer(data):
        event = json.loads(match[1])
        usage = event.get("usage") or usage
        piece = "".join(_said(choice) for choice in event["choices"])
        if piece:
            text.append(piece)
            times.append(line.times[bisect.bisect_left(line.ends, match.end())])
    if not (usage and times):
        raise StreamFailed("the stream has no text or no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        line.started,
        times[0],
        times[-1],
        "".join(text),
        usage["prompt_tokens"],
        details.get("cached_tokens", 0),
        usage["completion_tokens"],
        tuple(times),
    )


def _said(choice: Json) -> str:
    """Text of a completion's or a chat's chunk, thinking included."""
    delta = choice.get("delta") or {}
    names = ("reasoning_content", "reasoning", "content")
    thought = next((delta[name] for name in names if delta.get(name)), "")
    return choice.get("text") or thought
