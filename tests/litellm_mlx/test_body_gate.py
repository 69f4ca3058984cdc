"""The gate that reads bodies, without LiteLLM: what passes through it, and how."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from litellm_mlx.body_gate import BodyGate
from litellm_mlx.proxy_gate import App

Messages = list[dict[str, Any]]
CHAT = b'{"messages": [{"role": "user", "content": "hi"}]}'
GONE = {"type": "http.disconnect"}


class Inner:
    """An app: keeps what it was sent, says what it is told to, or raises."""

    def __init__(self, *answer: dict[str, Any], error: Exception | None = None) -> None:
        self.answer, self.error = answer, error
        self.got: Messages = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.got.append(await receive())
        while self.got[-1].get("more_body"):
            self.got.append(await receive())
        self.got.append(await receive())
        for message in self.answer:
            await send(message)
        if self.error is not None:
            raise self.error


def ask(
    app: App,
    *pieces: bytes,
    kind: bytes = b"application/json",
    told: Messages | None = None,
) -> Messages:
    """Send a body in pieces to the chat route, then leave; what came back."""
    told = [] if told is None else told
    last = len(pieces) - 1
    sent: Iterator[dict[str, Any]] = iter(
        [
            {"type": "http.request", "body": piece, "more_body": number < last}
            for number, piece in enumerate(pieces)
        ]
        + [GONE]
    )

    async def receive() -> Any:
        return next(sent)

    async def send(message: Any) -> None:
        told.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions",
             "headers": [(b"content-type", kind)]}  # fmt: skip
    asyncio.run(BodyGate(app)(scope, receive, send))
    return told


def begin(status: int) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": []}


END = {"type": "http.response.body", "body": b"x"}


def rejected(said: str) -> Exception:
    """As LiteLLM loses a refusal: another error while it words the first."""
    error = ModuleNotFoundError("No module named 'prisma'")
    error.__context__ = ValueError(said)
    return error


def test_a_body_in_pieces_is_handed_on_as_it_came() -> None:
    """And what comes behind it: that the client has left."""
    inner = Inner(begin(200), END)
    assert ask(inner, CHAT[:9], CHAT[9:]) == [begin(200), END]
    assert [message.get("body") for message in inner.got[:2]] == [CHAT[:9], CHAT[9:]]
    assert inner.got[2:] == [GONE]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 5000])
def test_what_is_no_json_is_for_litellm_to_refuse(body: bytes) -> None:
    assert ask(Inner(begin(400), END), body) == [begin(400), END]


def test_a_form_is_not_read_as_json() -> None:
    inner = Inner(begin(200), END)
    assert ask(inner, b"3", kind=b"multipart/form-data; x") == [begin(200), END]


def test_a_wrong_type_never_reaches_the_app() -> None:
    inner = Inner(begin(200), END)
    start, body = ask(inner, b'{"tools":', b" 3}")
    assert (start["status"], inner.got) == (400, [])
    assert json.loads(body["body"])["error"]["param"] == "tools"


def test_a_refusal_that_was_lost_is_found_again() -> None:
    """Behind the 500 that starlette has already written, or before any."""
    error = rejected("Rejected Request: api_base is not allowed in request body.")
    for said in ((), (begin(500), END)):
        start, body = ask(Inner(*said, error=error), CHAT)
        assert start["status"] == 400
        assert json.loads(body["body"])["error"]["param"] == "api_base"


def test_a_failure_that_was_told_goes_out_as_it_is() -> None:
    assert ask(Inner(begin(500), END), CHAT) == [begin(500), END]


@pytest.mark.parametrize(
    ("said", "error"),
    [((begin(500), END), ValueError("a defect")),
     ((begin(200),), rejected("Rejected Request: too late"))],
    ids=["a defect", "an answer has begun"],
)  # fmt: skip
def test_any_other_error_goes_on_behind_what_was_said(said: Any, error: Any) -> None:
    told: Messages = []
    with pytest.raises(type(error)) as raised:
        ask(Inner(*said, error=error), CHAT, told=told)
    assert (raised.value, told) == (error, list(said))
