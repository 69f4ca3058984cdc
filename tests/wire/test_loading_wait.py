"""A request that comes while its model is being loaded waits for it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from sidecar.app import App
from sidecar.residents.text_resident import TextLoader
from testkit.servers import running_sidecar

ASKED = {
    "model": "local",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Hello"}],
}


class HeldLoad:
    """A load that goes on when it is let."""

    def __init__(self) -> None:
        self.go = threading.Event()


@pytest.fixture
def held(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[App, HeldLoad]]:
    """A sidecar whose model is not there yet."""
    load, gate = TextLoader.load, HeldLoad()

    def waiting(self: TextLoader, spec: object, tell: Callable[[str], None]) -> object:
        tell("weights_loading")
        assert gate.go.wait(120)
        return load(self, spec, tell)  # type: ignore[arg-type]

    monkeypatch.setattr(TextLoader, "load", waiting)
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings, ready=False) as app:
        try:
            yield app, gate
        finally:
            gate.go.set()


def test_ready_is_told_apart_from_alive(held: tuple[App, HeldLoad]) -> None:
    """/health says that the process lives, /ready that it answers."""
    app, gate = held
    health, ready = (
        httpx.get(f"{app.url}/{n}", timeout=60) for n in ("health", "ready")
    )
    assert (health.status_code, health.json()["status"]) == (200, "loading")
    assert ready.status_code == 503
    assert ready.headers["retry-after"]
    gate.go.set()
    assert httpx.post(
        f"{app.url}/v1/chat/completions", json=ASKED, timeout=120
    ).is_success
    assert httpx.get(f"{app.url}/ready", timeout=60).status_code == 200


def test_a_whole_answer_waits_for_the_load(held: tuple[App, HeldLoad]) -> None:
    """Its client gets it, no 503."""
    app, gate = held
    threading.Timer(1.5, gate.go.set).start()
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=ASKED, timeout=120)
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_stream_tells_of_the_load_and_then_answers(
    path: str, held: tuple[App, HeldLoad]
) -> None:
    """In comments, which no client takes for an answer."""
    app, gate = held
    body = {**ASKED, "stream": True, "input": "Hello", "max_output_tokens": 4}
    lines = []
    url = f"{app.url}/v1/{path}"
    with httpx.stream("POST", url, json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            lines.append(line)
            if line.startswith(": loading"):
                gate.go.set()
    assert ": loading the model: weights_loading" in lines
    ends = {"chat/completions": "data: [DONE]", "messages": "event: message_stop"}
    assert ends.get(path, "event: response.incomplete") in lines


def test_the_sdks_read_such_a_stream(held: tuple[App, HeldLoad]) -> None:
    """openai and anthropic pass over the comments."""
    app, gate = held
    threading.Timer(2.5, gate.go.set).start()
    any_key: Any = {"api_key": "any", "max_retries": 0}
    with openai.OpenAI(base_url=f"{app.url}/v1", **any_key) as client:
        chunks = list(client.chat.completions.create(**ASKED, stream=True))  # type: ignore[call-overload]
        assert chunks[-1].choices[0].finish_reason == "length"
    with (
        anthropic.Anthropic(base_url=app.url, **any_key) as claude,
        claude.messages.stream(**ASKED) as stream,  # type: ignore[arg-type]
    ):
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_what_names_its_longest_wait_is_refused(held: tuple[App, HeldLoad]) -> None:
    """A router sends it elsewhere: it must see a status."""
    app, _ = held
    body = {**ASKED, "stream": True, "mlx_max_ttft_s": 0.05}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 503
