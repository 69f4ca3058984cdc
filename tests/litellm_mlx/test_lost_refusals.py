"""Refusals of LiteLLM's that are lost on their way out, without LiteLLM."""

import asyncio
import json
from typing import Any

import pytest

from litellm_mlx import lost_refusals
from litellm_mlx.asgi import App

Messages = list[dict[str, Any]]
SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}


class Inner:
    """An app: says what it is told to, or raises."""

    def __init__(self, *answer: dict[str, Any], error: Exception | None = None) -> None:
        self.answer, self.error = answer, error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for message in self.answer:
            await send(message)
        if self.error is not None:
            raise self.error


def ask(app: App, told: Messages | None = None) -> Messages:
    """What comes back from the chat route."""
    told = [] if told is None else told

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        told.append(message)

    asyncio.run(lost_refusals.run(app, {**SCOPE}, receive, send, SCOPE["path"]))
    return told


def begin(status: int) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": []}


END = {"type": "http.response.body", "body": b"x"}


def rejected(said: str) -> Exception:
    """As LiteLLM loses a refusal: another error while it words the first."""
    error = ModuleNotFoundError("No module named 'prisma'")
    error.__context__ = ValueError(said)
    return error


def test_a_refusal_that_was_lost_is_found_again() -> None:
    """Behind the 500 that starlette has already written, or before any."""
    error = rejected("Rejected Request: api_base is not allowed in request body.")
    for said in ((), (begin(500), END)):
        start, body = ask(Inner(*said, error=error))
        assert start["status"] == 400
        assert json.loads(body["body"])["error"]["param"] == "api_base"


def test_a_failure_that_was_told_goes_out_as_it_is() -> None:
    assert ask(Inner(begin(500), END)) == [begin(500), END]


@pytest.mark.parametrize(
    ("said", "error"),
    [((begin(500), END), ValueError("a defect")),
     ((begin(200),), rejected("Rejected Request: too late"))],
    ids=["a defect", "an answer has begun"],
)  # fmt: skip
def test_any_other_error_goes_on_behind_what_was_said(said: Any, error: Any) -> None:
    told: Messages = []
    with pytest.raises(type(error)) as raised:
        ask(Inner(*said, error=error), told)
    assert (raised.value, told) == (error, list(said))
