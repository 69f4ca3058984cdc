"""What is sent on Google's streaming route, event by event."""

import asyncio
import json
from typing import Any

import pytest

from litellm_mlx.google_stream import readable

PATH = "/v1beta/models/local:streamGenerateContent"


def sent(path: str, *bodies: bytes) -> list[bytes]:
    """What comes out where these bodies go in."""
    told: list[bytes] = []

    async def send(message: Any) -> None:
        told.append(message["body"])

    async def play() -> None:
        sending = readable(path, send)
        for body in bodies:
            await sending({"type": "http.response.body", "body": body})

    asyncio.run(play())
    return told


@pytest.mark.parametrize(
    ("code", "wanted"), [("400", 400), ("503", 503), (400, 400), ("busy", 500)]
)
def test_an_error_within_a_stream_has_googles_shape(code: Any, wanted: int) -> None:
    """Its SDK for Python compares the code, and broke off with a TypeError."""
    error = {"message": "too long", "type": "x", "param": None, "code": code}
    event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    (body,) = sent(PATH, event + b"data: [DONE]\n\n")
    told = json.loads(body.removeprefix(b"data: "))["error"]
    assert (told["code"], told["message"]) == (wanted, "too long")
    assert isinstance(told["status"], str)
    assert sent("/v1/chat/completions", event) == [event]


def test_comments_become_chunks_that_say_nothing() -> None:
    """But not within an event that is half sent."""
    ping, chunk = b": ping\n\n", b'data: {"a": 1}\n\n'
    first, second, half, within, rest = sent(
        PATH, ping, chunk, b"data: {", ping, b"}\n\n"
    )
    assert json.loads(first.removeprefix(b"data: "))["candidates"]
    assert (second, half, within, rest) == (chunk, b"data: {", b"", b"}\n\n")
