"""
Streams on Google's route, as Google's own SDKs read them.

What they take is read from google-genai 3.4.0 (Python, `chats.py`, `_api_client.py`)
and @google/genai 3.1.0 (JS): each chunk must hold a content with parts that are not
empty, else the whole turn is left out of the conversation without a word; and each line
that is neither blank nor begins with `data: ` is taken for JSON.
"""

import json
from typing import Any

import pytest

from testkit.proxy import Proxy
from testkit.scripted import Answer, Call, Switch, render

STREAM = "/v1beta/models/local:streamGenerateContent?alt=sse"
KEY = {"x-goog-api-key": "any"}
DECLARED = {
    "name": "read", "description": "d",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def streamed(proxy: Proxy, *contents: Any, **more: Any) -> list[dict[str, Any]]:
    """The chunks of an answer, read as the SDK for Python reads lines."""
    body = {"contents": list(contents), **more}
    answer = proxy.http.post(STREAM, json=body, headers=KEY)
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line]
    assert [line for line in lines if not line.startswith("data: ")] == []
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def kept(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What both SDKs send back of a streamed turn; fails where they would drop it."""
    contents = [chunk["candidates"][0]["content"] for chunk in chunks]
    for content in contents:
        assert content["role"] == "model"
        assert content["parts"], chunks
        assert all(content["parts"]), chunks
    reasons = [chunk["candidates"][0].get("finishReason") for chunk in chunks]
    assert reasons[-1] == "STOP"
    assert not any(reasons[:-1])
    return contents


@pytest.mark.parametrize("with_call", [False, True], ids=["text", "call"])
def test_a_streamed_turn_is_not_forgotten_by_googles_sdks(
    proxy: Proxy, switch: Switch, with_call: bool
) -> None:
    """The last chunk had no parts: both left out the turn and what it answered."""
    calls = (Call("read", {"path": "a.txt"}),) if with_call else ()
    said = Answer("", "Of two words.", calls)
    switch.script = lambda prompt: render(said, prompt)
    tools = {"tools": [{"functionDeclarations": [DECLARED]}]}
    more: Any = tools if with_call else {}
    past = kept(streamed(proxy, user("My name is Ann."), **more))
    parts = [part for content in past for part in content["parts"]]
    assert "".join(part.get("text", "") for part in parts).strip() == said.text
    found = [part["functionCall"] for part in parts if "functionCall" in part]
    assert [call["name"] for call in found] == [call.name for call in calls]
    switch.prompts.clear()
    kept(streamed(proxy, user("My name is Ann."), *past, user("And?"), **more))
    turns = switch.prompts[-1].turns
    roles = [turn.role for turn in turns if turn.role != "system"]
    assert roles == ["user", "assistant", "user"], turns
    assert turns[-2].text == said.text
    assert turns[-2].calls == calls


def test_a_stream_on_googles_route_counts_its_tokens(
    proxy: Proxy, switch: Switch
) -> None:
    """Zeros were told, and of a whole answer not what was reused nor thought."""
    said = Answer("Let me think.", "Of two words.")
    switch.script = lambda prompt: render(said, prompt)
    asked = user("Count my tokens, all of them, and those that are stored as well.")
    streamed(proxy, asked)
    told = streamed(proxy, asked)[-1]["usageMetadata"]
    path = STREAM.replace("streamGenerateContent?alt=sse", "generateContent")
    answer = proxy.http.post(path, json={"contents": [asked]}, headers=KEY)
    whole = answer.json()["usageMetadata"]
    names = ("promptTokenCount", "cachedContentTokenCount", "candidatesTokenCount",
             "thoughtsTokenCount")  # fmt: skip
    for counts in (told, whole):
        assert all(counts[name] > 0 for name in names), counts
        kinds = ("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount")
        assert counts["totalTokenCount"] == sum(counts[name] for name in kinds)
    assert {name: told[name] for name in names} == {name: whole[name] for name in names}


def test_an_answer_without_words_is_no_obstacle(proxy: Proxy, switch: Switch) -> None:
    switch.script = lambda prompt: "Plain."
    empty = {"role": "model", "parts": [{"text": ""}]}
    kept(streamed(proxy, user("hi"), empty, empty, user("And?")))
