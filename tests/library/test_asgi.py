"""The model mounted in another program's server: uvicorn, with OpenAI's client."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from sidecar.library import Model, open_model
from testkit.tiny_models import make_model


@contextlib.contextmanager
def _mounted(model: Model, at: str) -> Iterator[str]:
    app = Starlette(routes=[Mount(at, app=model.asgi())])
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=[[listening]])
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}{at}"
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = make_model(tmp_path_factory.mktemp("asgi") / "dense", "dense")
    settings = {"MAX_BODY_MB": "1", "KEEPALIVE_SECONDS": "0.2"}
    with open_model(str(folder), settings) as opened:
        yield opened


@pytest.mark.parametrize("at", ["/v1", "/models/v1", "/local"])
def test_chats_whole_and_streamed_wherever_it_is_mounted(model: Model, at: str) -> None:
    with (
        _mounted(model, at) as url,
        openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client,
    ):
        asked = {"model": "local", "temperature": 0, "max_tokens": 6,
                 "messages": [{"role": "user", "content": "Hello"}]}  # fmt: skip
        whole = client.chat.completions.create(**asked).choices[0].message.content  # type: ignore[call-overload]
        pieces = client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        streamed = "".join(
            one.choices[0].delta.content or "" for one in pieces if one.choices
        )
        assert whole
        assert streamed == whole
        assert [one.id for one in client.models.list()] == ["openai/dense"]


def test_messages_and_errors_have_their_own_shape(model: Model) -> None:
    with (
        _mounted(model, "/v1") as url,
        anthropic.Anthropic(
            base_url=url.removesuffix("/v1"), api_key="any", max_retries=0
        ) as client,
    ):
        said = client.messages.create(
            model="local", max_tokens=4, messages=[{"role": "user", "content": "Hi"}]
        )
        assert said.usage.output_tokens == 4
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(
                model="no-such",
                max_tokens=4,
                messages=[{"role": "user", "content": "H"}],
            )
        for path, body, status in (
            ("/chat/completions", b"{", 400),
            ("/chat/completions", b" " * (1 << 21), 413),
            ("/nothing", b"{}", 404),
            ("/batches", b"{}", 404),
            ("/files", b"{}", 404),
            ("/../admin/models", b"{}", 404),
        ):
            answer = httpx.post(f"{url}{path}", content=body, timeout=60)
            assert answer.status_code == status, (path, answer.text)
        for name in ("openai/dense", "openai%2Fdense"):
            found = httpx.get(f"{url}/models/{name}").json()
            assert found["details"]["model_type"] == "qwen3"
        assert httpx.get(f"{url}/models/openai%252Fdense").status_code == 404
        evil = httpx.get(f"{url}/models", headers={"Origin": "http://evil.example"})
        assert evil.status_code == 403
        odd = httpx.get(f"{url}/models", headers={"Host": "evil.example"})
        assert odd.status_code == 403


def test_a_client_that_leaves_frees_its_place(model: Model) -> None:
    with model._core.pool.lease("") as served:
        never = dict.fromkeys(map(str, served.engine.model.stop_ids), -100)
    body = {"model": "local", "max_tokens": 30_000, "stream": True,
            "logit_bias": never,  # however late the first line is read, it goes on
            "messages": [{"role": "user", "content": "Hello"}]}  # fmt: skip
    admission = model._core.shared.admission
    with _mounted(model, "/v1") as url:
        with httpx.stream("POST", f"{url}/chat/completions", json=body) as answer:
            next(answer.iter_lines())
            assert admission.num_open == 1
        deadline = time.monotonic() + 60
        while admission.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_key_is_asked_for_where_one_is_set(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "dense", "dense")
    with (
        open_model(str(folder), {"MLX_API_KEY": "secret"}) as opened,
        _mounted(opened, "/v1") as url,
    ):
        assert httpx.get(f"{url}/models").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/models", headers=key).status_code == 200


def test_a_model_that_was_closed_says_so(tmp_path: Path) -> None:
    """At once, streamed or not."""
    folder = make_model(tmp_path / "dense", "dense")
    model = open_model(str(folder))
    talk = [{"role": "user", "content": "Hello"}]
    with _mounted(model, "/v1") as url:
        model.close()
        for stream in (False, True):
            body = {"model": "local", "messages": talk, "stream": stream}
            answer = httpx.post(f"{url}/chat/completions", json=body, timeout=20)
            assert answer.status_code == 503, answer.text
        body = {"model": "local", "prompt": "a"}
        assert httpx.post(f"{url}/completions", json=body).status_code == 503
