"""Sends recorded requests again and reads the streamed answers, as an agent would."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from testkit.scripted import Call, Json
from testkit.traces import Exchange


@dataclass(slots=True)
class Reply:
    """
    What came, in no dialect.

    Args:
        kinds: what came in which order, without repeats in a row: `reasoning`,
            `text`, `call`.
    """

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    finish: str = ""
    usage: Json = field(default_factory=dict)

    def note(self, kind: str) -> None:
        """Count a piece of this kind."""
        if self.kinds[-1:] != [kind]:
            self.kinds.append(kind)


class Replayer:
    """
    One agent's conversation, repeated against a server.

    The calls of the new answers have ids of their own; where later requests speak of
    the recorded ones, the new ids take their place.
    """

    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self._model = model
        self._new_ids: dict[str, str] = {}
        self._tokens: dict[str, str] = {}  # of thinking, by its text

    def send(self, exchange: Exchange) -> Reply:
        """
        Send one request and read its answer to the end.

        Raises:
            AssertionError: the answer is refused, broken off or out of order.
        """
        with self._http.stream(
            "POST",
            exchange.path,
            content=self._body(exchange),
            headers={**exchange.headers, "Authorization": "Bearer any"},
        ) as response:
            if response.status_code != 200:
                raise AssertionError(response.read().decode()[:500])
            events = list(_events(response.iter_lines()))
        read = read_messages if exchange.is_anthropic else read_chat
        reply = read(events)
        for token in reply.tokens:
            self._tokens[exchange.answer.reasoning.strip()] = token
        for old, new in zip(exchange.call_ids, reply.call_ids, strict=False):
            self._new_ids[old] = new
            # OpenClaw sends ids back without the underscore.
            self._new_ids[old.replace("_", "")] = new.replace("_", "")
        return reply

    def _body(self, exchange: Exchange) -> str:
        body = {**exchange.body, "model": self._model}
        body["messages"] = [self._signed(message) for message in body["messages"]]
        text = json.dumps(body, ensure_ascii=False)
        for old, new in self._new_ids.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        return text

    def _signed(self, message: Json) -> Json:
        """A message whose thinking carries the tokens of the new answers."""
        if not isinstance(message["content"], list):
            return message
        blocks = [
            {**block, "signature": self._tokens[block["thinking"].strip()]}
            if block.get("thinking", "").strip() in self._tokens
            else block
            for block in message["content"]
        ]
        return {**message, "content": blocks}


def _events(lines: Iterator[str]) -> Iterator[Any]:
    """The data of each server-sent event, `[DONE]` as text."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def read_chat(events: list[Any]) -> Reply:
    """Put a Chat stream together."""
    assert events[-1] == "[DONE]", events[-1]
    chunks = events[:-1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    reply, arguments = Reply(), {}
    for chunk in chunks:
        reply.usage = chunk.get("usage") or reply.usage
        for choice in chunk["choices"]:
            assert not (reply.finish and any(choice["delta"].values()))
            _take_delta(choice["delta"], reply, arguments)
            reply.finish = choice.get("finish_reason") or reply.finish
    for index, name in enumerate(arguments):
        assert name[0] == index
        reply.calls.append(Call(name[1], json.loads(arguments[name])))
    return reply


def _take_delta(delta: Json, reply: Reply, arguments: dict[Any, str]) -> None:
    if delta.get("reasoning_content"):
        reply.note("reasoning")
        reply.reasoning += delta["reasoning_content"]
    if delta.get("content"):
        reply.note("text")
        reply.text += delta["content"]
    for call in delta.get("tool_calls") or ():
        reply.note("call")
        function = call["function"]
        if call.get("id"):
            reply.call_ids.append(call["id"])
            arguments[call["index"], function["name"]] = ""
        key = next(key for key in arguments if key[0] == call["index"])
        arguments[key] += function.get("arguments") or ""


def read_messages(events: list[Any]) -> Reply:
    """Put a Messages stream together."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start", kinds
    assert kinds[-2:] == ["message_delta", "message_stop"], kinds
    reply = Reply()
    open_index: int | None = None
    arguments = ""
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_index is None
            open_index, block = event["index"], event["content_block"]
            arguments = ""
            if block["type"] == "tool_use":
                reply.call_ids.append(block["id"])
                reply.calls.append(Call(block["name"], {}))
        elif kind == "content_block_delta":
            assert event["index"] == open_index
            arguments += _take_block_delta(event["delta"], reply)
        elif kind == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
            if arguments:
                name = reply.calls[-1].name
                reply.calls[-1] = Call(name, json.loads(arguments))
        elif kind == "message_delta":
            assert open_index is None
            reply.finish, reply.usage = event["delta"]["stop_reason"], event["usage"]
    return reply


def _take_block_delta(delta: Json, reply: Reply) -> str:
    """Note a delta; returns a piece of tool arguments, or nothing."""
    if delta["type"] == "signature_delta":
        reply.tokens.append(delta["signature"])
    elif delta["type"] == "thinking_delta" and delta["thinking"]:
        reply.note("reasoning")
        reply.reasoning += delta["thinking"]
    elif delta["type"] == "text_delta" and delta["text"]:
        reply.note("text")
        reply.text += delta["text"]
    elif delta["type"] == "input_json_delta":
        reply.note("call")
        return str(delta["partial_json"])
    return ""
