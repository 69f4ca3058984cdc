"""
What a router and its clients are promised: no silence, and early word of a late start.

A real proxy stands before a sidecar with a slow model, and beside it a "cloud": the
built-in model of another sidecar, reached as any OpenAI-compatible provider is.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from sidecar.app import App
from tests.support.proxy import Proxy, running_proxy
from tests.support.raw_http import eventually
from tests.support.servers import running_sidecar
from tests.support.slow_model import slow_down
from tests.support.tiny_models import make_model

KEEPALIVE_S = 1.0
FIRST_BYTE_S = 2.0
CHUNK = 32
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The sidecar whose model a test slows down: another class than the cloud's."""
    folder = make_model(tmp_path_factory.mktemp("slow") / "slow", "hybrid")
    settings = {
        "MODEL_PATH": str(folder),
        "PREFILL_STEP_SIZE": str(CHUNK),
        "KEEPALIVE_SECONDS": str(KEEPALIVE_S),
    }
    with running_sidecar(settings) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(
    slow: App, app: App, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    cloud = {"model": "openai/local", "api_base": f"{app.url}/v1", "api_key": "any"}
    hurried = {"model": "mlx/local", "mlx_max_ttft_s": 0.5}
    own = {
        "model_list": [
            {"model_name": "cloud", "litellm_params": cloud},
            {"model_name": "hurried", "litellm_params": hurried},
            {"model_name": "hurried-alone", "litellm_params": hurried},
        ],
        "router_settings": {"fallbacks": [{"hurried": ["cloud"]}]},
    }
    folder = tmp_path_factory.mktemp("contract")
    with running_proxy(slow.url, folder, own=own, keepalive_s=KEEPALIVE_S) as running:
        yield running


def prompt_of(slow: App, num_chunks: int, seed: int) -> str:
    """A text of about that many prefill chunks, unlike any of another seed."""
    words = " ".join(f"s{seed}w{i}" for i in range(num_chunks * 3))
    with slow.pool.lease("local") as served:
        encode = served.engine.model.tokenizer.encode
        while len(encode(words)) < num_chunks * CHUNK:
            words += f" and s{seed}"
    return words


def body(text: str, model: str = "local") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": 4, "stream": True}


def arrivals(proxy: Proxy, path: str, data: dict[str, Any]) -> tuple[list[float], str]:
    """Seconds from the send to each piece of a stream, and all of it."""
    started = time.monotonic()
    times, pieces = [], []
    with proxy.http.stream("POST", path, json=data) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            times.append(time.monotonic() - started)
            pieces.append(piece)
    return times, b"".join(pieces).decode()


def check_not_silent(proxy: Proxy, slow: App, path: str, seconds: int) -> None:
    """The prompt takes that long; the client hears something all the while."""
    num_chunks = seconds * 2
    data = body(prompt_of(slow, num_chunks, seconds + len(path)))
    times, text = arrivals(proxy, path, data)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[-1] > 0.8 * seconds, "this was no slow prompt"
    assert times[0] <= FIRST_BYTE_S
    assert max(gaps) <= KEEPALIVE_S + FIRST_BYTE_S
    end = "message_stop" if path == MESSAGES else "data: [DONE]"
    assert end in text


@pytest.fixture
def half_a_second_a_chunk(slow: App, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(slow, lambda n: 0.5 * n / CHUNK if n > 1 else 0.0, monkeypatch)


@pytest.mark.usefixtures("half_a_second_a_chunk")
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_cold_prompt_is_not_silent(proxy: Proxy, slow: App, path: str) -> None:
    """Something comes at once, and then each KEEPALIVE_SECONDS."""
    check_not_silent(proxy, slow, path, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("half_a_second_a_chunk")
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_forty_cold_seconds_are_not_silent(proxy: Proxy, slow: App, path: str) -> None:
    """As long as a 10k prompt takes on a 27B model."""
    check_not_silent(proxy, slow, path, 40)


def test_the_sdks_read_through_the_quiet(
    proxy: Proxy, slow: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a read time-out far below the prefill's length."""
    slow_down(slow, lambda n: 0.5 * n / CHUNK if n > 1 else 0.0, monkeypatch)
    patience = 3 * KEEPALIVE_S
    first = body(prompt_of(slow, 12, 1))
    chat = proxy.openai.with_options(timeout=patience)
    chunks = list(chat.chat.completions.create(**first))
    assert chunks[-1].choices[0].finish_reason == "length"
    second = {**body(prompt_of(slow, 12, 2)), "stream": False}
    second.pop("stream")
    messages = proxy.anthropic.with_options(timeout=patience)
    with messages.messages.stream(**second) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_failure_after_admission_is_an_error_in_the_stream(
    proxy: Proxy, slow: App, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Headers are long out when a chunk fails; both SDKs raise."""

    def fail_at_depth(num_tokens: int) -> float:
        nonlocal chunks
        chunks += num_tokens > 1
        if chunks == 5:
            raise RuntimeError("planted failure")
        return 0.1

    chunks = 0
    slow_down(slow, fail_at_depth, monkeypatch)
    data = body(prompt_of(slow, 8, 30 + len(path)))
    if path == CHAT:
        with pytest.raises(openai.APIError, match="planted failure"):
            list(proxy.openai.chat.completions.create(**data))
    else:
        data.pop("stream")
        with (
            pytest.raises(anthropic.APIError, match="planted failure"),
            proxy.anthropic.messages.stream(**data) as stream,
        ):
            stream.get_final_message()
    assert eventually(lambda: slow.pool.num_leases == 0)
    monkeypatch.undo()
    assert arrivals(proxy, CHAT, body("and now?"))[1].endswith("data: [DONE]\n\n")


@pytest.mark.usefixtures("half_a_second_a_chunk")
def test_what_would_begin_too_late_goes_to_the_cloud_at_once(
    proxy: Proxy, slow: App
) -> None:
    """`mlx_max_ttft_s` of a model entry: refused before any of it is computed."""
    with slow.pool.lease("local") as served:
        served.engine._loop.pacer.prefilled(CHUNK, 0.5)  # as the last prompt showed
    text = prompt_of(slow, 20, 50)
    started = time.monotonic()
    answer = proxy.openai.chat.completions.with_raw_response.create(
        **{**body(text, "hurried"), "stream": False}
    )
    assert time.monotonic() - started < 3.0  # 10 s here
    assert answer.headers["x-litellm-model-group"] == "cloud"
    assert answer.parse().choices[0].message.content is not None
    with pytest.raises(openai.APIStatusError, match="mlx_max_ttft_s is 0.5") as caught:
        proxy.openai.chat.completions.create(
            **{**body(text, "hurried-alone"), "stream": False}
        )
    assert caught.value.status_code == 503


def test_what_is_warm_stays_here(
    proxy: Proxy, slow: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt, once it is stored, begins in time."""
    text = prompt_of(slow, 20, 60)
    arrivals(proxy, CHAT, body(text))
    slow_down(slow, lambda n: 0.5 * n / CHUNK if n > 1 else 0.0, monkeypatch)
    with slow.pool.lease("local") as served:
        served.engine._loop.pacer.prefilled(CHUNK, 0.5)
    answer = proxy.openai.chat.completions.create(
        **{**body(text, "hurried-alone"), "stream": False}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    assert answer.usage.prompt_tokens - cached <= 2


@pytest.mark.usefixtures("half_a_second_a_chunk")
def test_health_answers_meanwhile(proxy: Proxy, slow: App) -> None:
    """A long prefill does not make the server look dead."""
    data = body(prompt_of(slow, 6, 70))
    thread = threading.Thread(target=arrivals, args=(proxy, CHAT, data))
    thread.start()
    assert eventually(lambda: slow.pool.num_leases == 1)
    started = time.monotonic()
    assert httpx.get(f"{slow.url}/health", timeout=5).json()["status"] == "ok"
    assert time.monotonic() - started < 1.0
    thread.join()
