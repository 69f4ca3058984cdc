"""A client of the proxy leaves, as with Esc: the sidecar stops computing for it."""

import json
from collections.abc import Iterator

import httpx
import pytest

from sidecar.app import App
from testkit.proxy import Proxy, running_proxy
from testkit.raw_http import connect, eventually, request
from testkit.servers import metric, running_sidecar
from testkit.slow_model import slow_down
from testkit.tiny_models import make_model

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LIMITS = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
TOKEN_S = 0.1
NUM_TOKENS = 4000  # over six minutes: no answer ends by itself in a test's time


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = make_model(tmp_path_factory.mktemp("slow") / "slow", "hybrid")
    with running_sidecar({"MODEL_PATH": str(folder)}) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(slow: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running_proxy(slow.url, tmp_path_factory.mktemp("leaving")) as running:
        yield running


def num_running(slow: App) -> float:
    return metric(slow, "mlx_active_requests")


@pytest.mark.parametrize("route", LIMITS)
@pytest.mark.parametrize("stream", [True, False], ids=["S", "N"])
def test_the_sidecar_stops(
    proxy: Proxy, slow: App, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool
) -> None:
    """LiteLLM itself leaves some answers open, and the model goes on."""
    slow_down(slow, lambda num_tokens: TOKEN_S, monkeypatch)
    asked = [{"role": "user", "content": "Count to a million."}]
    name = "input" if route == RESPONSES else "messages"
    body = {"model": "local", name: asked, LIMITS[route]: NUM_TOKENS, "stream": stream}
    port = httpx.URL(proxy.url).port
    assert port is not None
    headers = ("Content-Type: application/json", "Authorization: Bearer any")
    with connect(port) as connection:
        connection.sendall(request(route, json.dumps(body).encode(), headers))
        assert eventually(lambda: num_running(slow) == 1)
        if stream:
            assert connection.recv(1 << 16)
    assert eventually(lambda: num_running(slow) == 0)
