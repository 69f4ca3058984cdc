"""
What a router and its clients are promised: no silence, and early word of a late start.

A real proxy stands before a sidecar with a slow model, and beside it a "cloud": the
built-in model of another sidecar, reached as any OpenAI-compatible provider is.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from sidecar.app import App
from testkit.proxy import Proxy, running_proxy
from testkit.raw_http import eventually
from testkit.servers import held_gpu, running_sidecar
from testkit.slow_model import slow_down
from testkit.tiny_models import make_model

KEEPALIVE_S = 1.0  # LiteLLM takes no less
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


def pieces(proxy: Proxy, path: str, data: dict[str, Any]) -> Iterator[str]:
    """A stream, as it comes."""
    with proxy.http.stream("POST", path, json=data) as answer:
        assert answer.status_code == 200
        yield from answer.iter_text()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    "num_pieces", [3, pytest.param(40, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_cold_prompt_is_not_silent(
    proxy: Proxy, slow: App, path: str, num_pieces: int
) -> None:
    """Something comes before any of it is computed, and then all the while."""
    data = body(prompt_of(slow, 2, len(path)))
    heard: list[str] = []
    with held_gpu(slow) as go:
        for piece in pieces(proxy, path, data):
            heard.append(piece)
            if len(heard) == num_pieces:
                go.set()
    assert len(heard) > num_pieces
    end = "message_stop" if path == MESSAGES else "data: [DONE]"
    assert end in "".join(heard)


def test_what_comes_on_googles_route_meanwhile_is_no_comment(
    proxy: Proxy, slow: App
) -> None:
    """Google's SDK for Python takes a comment for JSON, and breaks off."""
    text = prompt_of(slow, 2, 77)
    data = {"contents": [{"role": "user", "parts": [{"text": text}]}],
            "generationConfig": {"maxOutputTokens": 4}}  # fmt: skip
    heard: list[str] = []
    for version in ("v1beta", "v1"):
        path = f"/{version}/models/local:streamGenerateContent?alt=sse"
        with held_gpu(slow) as go:
            for piece in pieces(proxy, path, data):
                heard.append(piece)
                if len(heard) % 3 == 0:
                    go.set()
    lines = [line for line in "".join(heard).splitlines() if line]
    for line in lines:
        assert line.startswith("data: "), line
        content = json.loads(line.removeprefix("data: "))["candidates"][0]["content"]
        assert content["role"] == "model"
        assert content["parts"], line
        assert all(content["parts"]), line
    assert '"finishReason": "STOP"' in lines[-1] or "MAX_TOKENS" in lines[-1]


def test_the_sdks_read_through_the_quiet(proxy: Proxy, slow: App) -> None:
    """With a read time-out far below the prefill's length."""
    patience = 8 * KEEPALIVE_S
    messages = body(prompt_of(slow, 2, 2))
    messages.pop("stream")
    for path in (CHAT, MESSAGES):  # LiteLLM takes long over its first request
        "".join(pieces(proxy, path, body("hello")))

    def chat() -> str | None:
        client = proxy.openai.with_options(timeout=patience)
        chunks = client.chat.completions.create(**body(prompt_of(slow, 2, 1)))
        return str(list(chunks)[-1].choices[0].finish_reason)

    def message() -> str | None:
        client = proxy.anthropic.with_options(timeout=patience)
        with client.messages.stream(**messages) as stream:
            return stream.get_final_message().stop_reason

    with ThreadPoolExecutor(2) as threads, held_gpu(slow):
        waiting = [threads.submit(chat), threads.submit(message)]
        assert eventually(lambda: slow.pool.num_leases == 2)
        time.sleep(1.5 * patience)
        assert slow.pool.num_leases == 2, "they did not wait"
    assert [each.result() for each in waiting] == ["length", "max_tokens"]


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
    assert "".join(pieces(proxy, CHAT, body("and now?"))).endswith("data: [DONE]\n\n")


def test_what_would_begin_too_late_goes_to_the_cloud_at_once(
    proxy: Proxy, slow: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mlx_max_ttft_s` of a model entry: refused before any of it is computed."""
    computed: list[int] = []
    slow_down(slow, computed.append, monkeypatch, lambda _: None)
    with slow.pool.lease("local") as served:
        served.engine._loop.pacer.prefilled(CHUNK, 0.5)  # as the last prompt showed
    text = prompt_of(slow, 20, 50)
    answer = proxy.openai.chat.completions.with_raw_response.create(
        **{**body(text, "hurried"), "stream": False}
    )
    assert answer.headers["x-litellm-model-group"] == "cloud"
    assert answer.parse().choices[0].message.content is not None
    with pytest.raises(openai.APIStatusError, match="mlx_max_ttft_s is 0.5") as caught:
        proxy.openai.chat.completions.create(
            **{**body(text, "hurried-alone"), "stream": False}
        )
    assert caught.value.status_code == 503
    assert computed == []


def test_what_is_warm_stays_here(proxy: Proxy, slow: App) -> None:
    """The same prompt, once it is stored, begins in time."""
    text = prompt_of(slow, 20, 60)
    assert "".join(pieces(proxy, CHAT, body(text))).endswith("data: [DONE]\n\n")
    with slow.pool.lease("local") as served:
        served.engine._loop.pacer.prefilled(CHUNK, 0.5)
    answer = proxy.openai.chat.completions.create(
        **{**body(text, "hurried-alone"), "stream": False}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    assert answer.usage.prompt_tokens - cached <= 2


def test_health_answers_meanwhile(proxy: Proxy, slow: App) -> None:
    """A long prefill does not make the server look dead."""
    data = body(prompt_of(slow, 6, 70))
    with ThreadPoolExecutor(1) as threads, held_gpu(slow):
        waiting = threads.submit(lambda: "".join(pieces(proxy, CHAT, data)))
        assert eventually(lambda: slow.pool.num_leases == 1)
        assert httpx.get(f"{slow.url}/health", timeout=120).json()["status"] == "ok"
        assert not waiting.done()
    assert "data: [DONE]" in waiting.result()
