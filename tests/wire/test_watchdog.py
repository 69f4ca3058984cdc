"""
GENERATION_WATCHDOG_SECONDS and GENERATION_DEADLINE_SECONDS, with a slow model.

The engine's clock is the test's: it moves by what a forward pass is said to take.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletion

from sidecar.app import App
from testkit.clock import Clock
from testkit.raw_http import eventually
from testkit.servers import running_sidecar
from testkit.slow_model import slow_down

ModelFolder = Callable[[str], Path]
TEXT = "tell me a long story about " + " ".join(f"w{i}" for i in range(40))


def serve(folder: Path, **settings: str) -> Iterator[App]:
    base = {"MODEL_PATH": str(folder), "PREFILL_STEP_SIZE": "16"}
    with running_sidecar({**base, **settings}) as app:
        yield app


@pytest.fixture(params=["dense", "hybrid"])
def watched(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[App]:
    yield from serve(model_folder(request.param), GENERATION_WATCHDOG_SECONDS="1")


@pytest.fixture
def limited(model_folder: ModelFolder) -> Iterator[App]:
    yield from serve(model_folder("dense"), GENERATION_DEADLINE_SECONDS="1")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    names = ("job", "prefill_queue", "sequence", "pacing", "scheduler")
    return Clock(monkeypatch, *(f"sidecar.engine.{name}" for name in names))


def ask(app: App, max_tokens: int = 12) -> ChatCompletion:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x", timeout=240) as client:
        return client.chat.completions.create(
            model="local",
            messages=[{"role": "user", "content": TEXT}],
            max_tokens=max_tokens,
        )


def texts(answer: ChatCompletion) -> tuple[object, str | None]:
    message = answer.choices[0].message
    return getattr(message, "reasoning_content", None), message.content


def is_sound(app: App) -> bool:
    with app.pool.lease("local") as served:
        engine = served.engine
        nothing_learnt = len(served.memory.lineage) == 0
        return nothing_learnt and engine.store.check_integrity() == []


def test_a_step_that_stalls_ends_the_answer(
    watched: App, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `length`; nothing of it is remembered, and the next answer is right."""
    expected = texts(ask(watched))
    with watched.pool.lease("local") as served:
        served.engine.clear()
        served.memory.lineage.forget(None)
    steps = 0

    def pause(num_tokens: int) -> float:
        nonlocal steps
        steps += num_tokens == 1
        return 1.3 if steps == 6 and num_tokens == 1 else 0.0

    with monkeypatch.context() as patch:
        slow_down(watched, pause, patch, clock.advance)
        cut = ask(watched)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens < 12
    assert eventually(lambda: is_sound(watched))
    again = ask(watched)
    assert texts(again) == expected
    assert again.usage is not None
    details = again.usage.prompt_tokens_details
    assert details is not None
    assert (details.cached_tokens or 0) < again.usage.prompt_tokens  # prompt only


def test_a_prefill_that_stalls_ends_the_answer(
    watched: App, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that takes too long; the chunks before it may be used again."""
    expected = texts(ask(watched))
    with watched.pool.lease("local") as served:
        served.engine.clear()
        served.memory.lineage.forget(None)
    chunks = 0

    def pause(num_tokens: int) -> float:
        nonlocal chunks
        chunks += num_tokens == 16
        return 1.3 if chunks == 3 and num_tokens == 16 else 0.0

    with monkeypatch.context() as patch:
        slow_down(watched, pause, patch, clock.advance)
        cut = ask(watched)
    assert chunks >= 3
    assert cut.choices[0].finish_reason == "length"
    assert eventually(lambda: is_sound(watched))
    assert texts(ask(watched)) == expected


def test_steady_progress_is_no_stall(
    watched: App, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold prompt may take many times the watchdog's second."""
    expected = texts(ask(watched))
    with watched.pool.lease("local") as served:
        served.engine.clear()
    began = clock.now()
    slow_down(watched, lambda _: 0.2, monkeypatch, clock.advance)
    assert texts(ask(watched)) == expected
    assert clock.now() - began > 3


def test_the_deadline_holds_in_all(
    limited: App, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However steady the progress is."""
    slow_down(limited, lambda _: 0.05, monkeypatch, clock.advance)
    cut = ask(limited, 500)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert 1 <= cut.usage.completion_tokens < 40
    assert eventually(lambda: is_sound(limited))
