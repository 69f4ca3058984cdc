"""A new wire format is a class and a row: nothing else knows of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.core.errors import BadRequest, SidecarError
from sidecar.core.events import Event, TextDelta, Usage
from sidecar.core.ports import Call, Dialect, RequestFacts
from sidecar.core.requests import ChatRequest, GenerationOptions, Message, Thinking
from sidecar.server import router
from sidecar.server.router import Services
from testkit.servers import running_sidecar


@dataclass
class Lines:
    """Text in, a line for each event out."""

    chat: ChatRequest

    def started(self, usage: Usage) -> bytes:
        return b"prompt %d\n" % usage.prompt_tokens

    def event(self, event: Event) -> bytes:
        return event.text.encode() if isinstance(event, TextDelta) else b""

    def ping(self) -> bytes:
        return b"\n"

    def failed(self, error: SidecarError) -> bytes:
        return error.message.encode()

    def encoder(self) -> "Lines":
        return self

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        said = "".join(e.text for e in events if isinstance(e, TextDelta))
        return {"said": said}


class Toy:
    """`{"say": TEXT, "stream": BOOL}`."""

    def parse(self, body: Any, facts: RequestFacts) -> Call:
        if "say" not in body:
            raise BadRequest("say is missing", param="say")
        return Lines(
            ChatRequest(
                facts.request_id, "", (Message("user", (body["say"],)),),
                thinking=Thinking(enabled=False),
                options=GenerationOptions(max_tokens=30),
                is_streamed=bool(body.get("stream")),
            )
        )  # fmt: skip

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        return "application/json", {"oh": error.message}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    known = router.dialects_of

    def with_toy(services: Services) -> dict[str, Dialect]:
        return {**known(services), "/toy": Toy()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "dialects_of", with_toy)
        with running_sidecar() as running:
            yield running


def test_a_toy_dialect_is_served_whole_streamed_and_refused(app: App) -> None:
    """With the engine, the cache, the limits and the errors of all others."""
    with httpx.Client(base_url=app.url, timeout=120) as http:
        whole = http.post("/toy", json={"say": "hi"})
        streamed = http.post("/toy", json={"say": "hi", "stream": True})
        refused = http.post("/toy", json={})
    assert whole.status_code == 200
    assert int(whole.headers["x-mlx-prompt-tokens"]) > 0
    assert streamed.text.startswith("prompt ")
    assert streamed.text.partition("\n")[2] == whole.json()["said"] != ""
    assert refused.status_code == 400
    assert refused.json() == {"oh": "say is missing"}
