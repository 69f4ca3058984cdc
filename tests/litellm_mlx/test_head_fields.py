"""What the head of a request tells LiteLLM besides its body."""

import time
from typing import Any

import pytest

from litellm_mlx.head_fields import head_fault
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.proxy_client import CHAT, ROUTES, body_for

LONG = "a1B" * 5_000
FORM = "multipart/form-data; boundary=x"


def form(*parts: tuple[str, str]) -> bytes:
    head = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    return ("".join(head.format(*part) for part in parts) + "--x--\r\n").encode()


@pytest.mark.parametrize(
    "path",
    [
        f"/engines/{LONG}/chat/completions", f"/openai/deployments/{LONG}/embeddings",
        f"/v1beta/models/{LONG}:generateContent", f"/v1/models/{LONG}",
    ],
    ids=["engine", "deployment", "google", "model"],
)  # fmt: skip
def test_a_long_name_in_the_path_is_400(proxy: Proxy, path: str) -> None:
    """LiteLLM looks through it for seconds, in which it serves nobody."""
    began = time.monotonic()
    body = {"contents": "hi", "messages": [{"role": "user", "content": "hi"}]}
    answer = proxy.http.post(path, json={**body, "input": "x"})
    assert answer.status_code == 400, answer.text[:300]
    assert "512 characters" in answer.text
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("query", [LONG, "local,cloud", "local&model=cloud", "a,"])
@pytest.mark.parametrize("route", ROUTES)
def test_the_query_names_one_model(proxy: Proxy, route: str, query: str) -> None:
    """Fifty names were fifty calls that somebody pays for."""
    body = body_for(route, "mlx/odd", stream=False)
    answer = proxy.http.post(f"{route}?model={query}", json=body)
    assert answer.status_code == 400, answer.text[:300]
    assert "one name" in answer.text


@pytest.mark.parametrize(
    "content",
    [
        form(("model", LONG)), form(("model", "a,b")),
        form(("model", "a"), ("model", LONG)),
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nabc',
        b'--x\r\nContent-Disposition: form-data; name="model"\r\nX: '
        + b"y" * 5000 + b"\r\n\r\nlocal\r\n--x--\r\n",
        b'--x\r\nCONTENT-disposition : form-data; NAME=model\r\n\r\n'
        + b"y" * 5000 + b"\r\n--x--\r\n",
        form(("model", "local\r\n--xy" + LONG)), form(("model", "local\r\n" + LONG)),
    ],
    ids=["long", "two", "second", "open", "long head", "other case", "near", "lines"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits"])
def test_a_form_names_one_model(proxy: Proxy, path: str, content: bytes) -> None:
    """A name of 1 MB held the port for an hour."""
    headers = {"content-type": FORM}
    answer = proxy.http.post(path, content=content, headers=headers)
    assert answer.status_code == 400, answer.text[:300]
    assert "model must be one name" in answer.text


def test_a_form_in_one_line_asks_no_model(proxy: Proxy) -> None:
    """LiteLLM would take its fields for those of a body."""
    kind = {"content-type": "application/x-www-form-urlencoded"}
    path = "/v1/audio/transcriptions"
    answer = proxy.http.post(path, content=f"model={LONG}", headers=kind)
    assert answer.status_code == 400, answer.text[:300]
    assert "the content type must be" in answer.text


@pytest.mark.parametrize("said", ["abc", "-1", "0", "nan", "inf", "", "1e9", "1, 2"])
@pytest.mark.parametrize(
    "name",
    ["x-litellm-timeout", "x-litellm-stream-timeout", "x-litellm-keepalive-seconds"],
)
def test_a_header_of_seconds_is_a_number(proxy: Proxy, name: str, said: str) -> None:
    """Below zero it was a reason to ask the cloud instead; a word was a 500."""
    body = body_for(CHAT, "mlx/odd", stream=False)
    answer = proxy.http.post(CHAT, json=body, headers={name: said})
    assert answer.status_code == 400, answer.text[:300]
    assert f"{name} must be a number of seconds" in answer.text


def test_tags_in_a_header_are_few(proxy: Proxy) -> None:
    """LiteLLM compares each with all others."""
    body = body_for(CHAT, "mlx/odd", stream=False)
    headers = {"x-litellm-tags": ",".join("t" * 65)}
    answer = proxy.http.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 400, answer.text[:300]
    assert "x-litellm-tags must name at most 64 tags" in answer.text


def test_a_form_with_a_short_name_goes_on(proxy: Proxy) -> None:
    """LiteLLM's answer, whatever it is, is about the file."""
    parts = form(("model", "mlx/odd"), ("prompt", "x"))
    for kind in (FORM, 'multipart/form-data; boundary="x"'):
        headers = {"content-type": kind}
        path = "/v1/audio/transcriptions"
        answer = proxy.http.post(path, content=parts, headers=headers)
        assert "model must be one name" not in answer.text


def test_ordinary_heads_are_let_through() -> None:
    headers: dict[str, Any] = {"x-litellm-timeout": "30.5", "x-litellm-tags": "a,b"}
    for path in (CHAT, "/engines/org/name/chat/completions", "/v1/models/org/name"):
        assert head_fault(path, ("local",), headers) is None
