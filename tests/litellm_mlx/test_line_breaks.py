"""Event streams break at the ends of their events only."""

import asyncio
import json

import pytest

from litellm_mlx import line_breaks
from litellm_mlx.asgi import Message
from sidecar.core.json_bytes import dump_line

TEXT = "a\u2028b\u2029c\u0085d\x0ce é"


def sent(content_type: bytes, body: bytes) -> bytes:
    """What a client is given of an answer."""
    came: list[bytes] = []

    async def send(message: Message) -> None:
        came.append(message.get("body", b""))

    async def run() -> None:
        sending = line_breaks.escaped(send)
        headers = [(b"content-type", content_type)]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await sending(start)
        await sending({"type": "http.response.body", "body": body})

    asyncio.run(run())
    return b"".join(came)


def test_no_event_is_cut_by_who_splits_lines_as_python_does() -> None:
    event = b"data: " + json.dumps({"a": TEXT}, ensure_ascii=False).encode() + b"\n\n"
    assert len(event.decode().splitlines()) == 5
    came = sent(b"text/event-stream; charset=utf-8", event).decode()
    first, last = came.splitlines()
    assert (json.loads(first[6:]), last) == ({"a": TEXT}, "")


@pytest.mark.parametrize("kind", [b"application/json", b"text/plain"])
def test_what_is_no_stream_is_left_as_it_is(kind: bytes) -> None:
    assert sent(kind, TEXT.encode()) == TEXT.encode()


def test_the_sidecars_own_events_are_lines() -> None:
    line = dump_line({"a": TEXT})
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"a": TEXT}
