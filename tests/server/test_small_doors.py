"""The small ways in: heads that two readers take differently, pages, other keys."""

import json
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.config.settings import ServerConfig
from sidecar.core.errors import Forbidden
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.server.access import check
from testkit.raw_http import eventually, exchange, request
from testkit.servers import held_gpu, running_sidecar

CHAT = "/v1/chat/completions"
ORIGIN = "https://app.example"
HEADS = [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: a\rOrigin: https://evil\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: a\x00b\r\n\r\n",
    b"GET /health\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX\r-A: a\r\n\r\n",
    b"GET /health HTTP/1.1\rHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: a\r\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost:\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_may_be_taken_for_another_is_refused(app: App, head: bytes) -> None:
    """A bare CR ends a line for some; a NUL a text; HTTP/1.1 names its host."""
    assert exchange(app.listener.port, head).status in (400, 403)


def test_http_1_0_needs_no_host(app: App) -> None:
    """It knows none; a browser sends one in each version."""
    data = b"GET /health HTTP/1.0\r\n\r\n"
    assert exchange(app.listener.port, data).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "CROSS-SITE"])
@pytest.mark.parametrize("path", ["/admin/cache", "/admin/cache/drift", "/v1/models"])
def test_a_page_elsewhere_gets_nothing_though_it_names_no_origin(
    app: App, site: str, path: str
) -> None:
    """An image, a script or a link: a GET that says where it is from in one header."""
    headers = (f"Sec-Fetch-Site: {site}",)
    assert exchange(app.listener.port, request(path, headers=headers)).status == 403


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_the_user_may_open_it(app: App, site: str) -> None:
    """By its address, or from a page of its own."""
    headers = (f"Sec-Fetch-Site: {site}",)
    answer = exchange(app.listener.port, request("/admin/cache", headers=headers))
    assert answer.status == 200


def test_an_allowed_origin_may_be_another_site() -> None:
    config = ServerConfig(cors_allow_origins=(ORIGIN,))
    headers = {"host": "localhost", "sec-fetch-site": "cross-site"}
    check(config, "GET", "/v1/models", {**headers, "origin": ORIGIN})
    with pytest.raises(Forbidden):
        check(config, "GET", "/v1/models", headers)


def test_a_long_model_name_is_not_said_again(app: App) -> None:
    """Nor compared with all names: that takes the square of its length."""
    body = {"model": "m" * 100_000, "messages": [{"role": "user", "content": "a"}]}
    answer = exchange(app.listener.port, request(CHAT, json.dumps(body).encode()))
    assert answer.status == 404
    assert len(answer.body) < 1500


def test_only_its_own_key_cancels_a_request(app: App) -> None:
    """An id may be guessed or read in a log."""

    def cancel(key: str) -> Any:
        url = f"{app.url}/v1/cancel/the-long-one"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.post(url, headers=headers, timeout=60).json()["cancelled"]

    headers = {"Authorization": "Bearer owner", "X-Request-ID": "the-long-one"}
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    with held_gpu(app), httpx.Client(timeout=120) as client:
        url = f"{app.url}{CHAT}"
        with client.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            assert not cancel("another")
            assert not cancel("")
            assert cancel("owner")
            assert "cancelled" in "".join(answer.iter_text())


def test_a_cancel_that_came_first_is_of_its_key_too(app: App) -> None:
    """The proxy may cancel what is still being read."""
    for key, status in (("another", 200), ("owner", 499)):
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{app.url}/v1/cancel/early-{key}-{status}"
        httpx.post(url, headers=headers, timeout=60)
        asked = {"Authorization": "Bearer owner"}
        asked["X-Request-ID"] = f"early-{key}-{status}"
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        answer = httpx.post(f"{app.url}{CHAT}", json=body, headers=asked, timeout=60)
        assert answer.status_code == status


def test_a_server_that_drains_is_not_well() -> None:
    """Who asks should send no more to it."""
    with running_sidecar() as app:
        app.pool.drain()
        answer = httpx.get(f"{app.url}/health", timeout=60)
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert eventually(lambda: app.pool.num_leases == 0)


class Panic(BaseException):
    """As the Rust code of a tokenizer raises it."""


def test_a_panic_in_a_request_is_its_error_alone(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no Exception; the client hears of it, and the next one is served."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    url = f"{app.url}{CHAT}"

    def panic(*_: Any, **__: Any) -> None:
        raise Panic("the tokenizer panicked")

    with monkeypatch.context() as broken:
        broken.setattr(PromptEncoder, "encode", panic)
        assert httpx.post(url, json=body, timeout=60).status_code == 500
    assert eventually(lambda: httpx.get(f"{app.url}/health").json()["status"] == "ok")
    assert httpx.post(url, json=body, timeout=60).status_code == 200
