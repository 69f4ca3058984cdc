"""Who may look at and change what is not for clients: our own page, and no other."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from sidecar.app import App
from sidecar.server.admin_codes import AdminCodes
from sidecar.server.admin_routes import _with_places
from sidecar.server.page_files import page_files
from testkit.servers import running_sidecar

TOKEN = "a-long-token"
JSON = "Content-Type: application/json"
CHANGE = ("/admin/settings", json.dumps({"DEFAULT_TOP_P": 0.5}).encode())


@pytest.fixture(scope="module")
def open_app(model_folder: Callable[[str], Path]) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        yield app


@pytest.fixture(scope="module")
def with_token(model_folder: Callable[[str], Path]) -> Iterator[App]:
    settings = {"MODEL_PATH": str(model_folder("dense")), "ADMIN_TOKEN": TOKEN}
    with running_sidecar(settings) as app:
        yield app


def send(
    app: App, path: str, *heads: str, body: bytes = b"{}", method: str = "POST"
) -> httpx.Response:
    headers = dict(head.split(": ", 1) for head in heads)
    content = body if method == "POST" else None
    return httpx.request(
        method, app.url + path, headers=headers, content=content, timeout=60
    )


def own(app: App) -> tuple[str, ...]:
    host = f"127.0.0.1:{app.listener.port}"
    return (f"Host: {host}", f"Origin: http://{host}", "Sec-Fetch-Site: same-origin")


def test_our_own_page_looks_and_changes(open_app: App) -> None:
    assert (
        send(open_app, "/admin/state", *own(open_app), method="GET").status_code == 200
    )
    path, body = CHANGE
    heads = (*own(open_app), JSON)
    assert send(open_app, path, *heads, body=body).status_code == 403
    answer = send(open_app, path, *heads, "X-Admin: 1", body=body)
    assert answer.status_code == 200, answer.content
    # A program that is no browser needs no such header.
    assert (
        send(open_app, path, JSON, body=b'{"DEFAULT_TOP_P": null}').status_code == 200
    )


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/admin/code?for=me", b"", "for"),
        ("/admin/code", b'{"for": 1}', None),
        ("/admin/exchange?code=x", b'{"code": "x"}', "code"),
        ("/admin/exchange", b'{"code": "x", "keep": true}', "keep"),
        ("/admin/settings?dry_run=1", b'{"DEFAULT_TOP_P": null}', "dry_run"),
        ("/admin/requests/x/cancel?all=1", b"", "all"),
        ("/admin/requests/x/cancel", b'{"all": true}', None),
        ("/v1/cancel/x?all=1", b"", "all"),
        ("/v1/cancel/x", b'{"all": true}', None),
    ],
)
def test_what_would_have_no_effect_is_refused(
    open_app: App, path: str, body: bytes, name: str | None
) -> None:
    """A flag that nobody reads looks as if it had been heeded."""
    answer = send(open_app, path, JSON, body=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    "heads",
    [
        ("Origin: http://localhost:{port}", "Sec-Fetch-Site: cross-site"),
        ("Origin: http://localhost:{port}",),
        ("Origin: http://127.0.0.1:1", "Sec-Fetch-Site: same-site"),
        ("Origin: https://127.0.0.1:{port}",),
        ("Origin: null",),
        ("Origin: http://127.0.0.1:{port}.evil.example",),
        ("Sec-Fetch-Site: cross-site",),
        ("Sec-Fetch-Site: same-site",),
        ("Origin: http://127.0.0.1:{port}", "Sec-Fetch-Site: cross-site"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_page_does(open_app: App, method: str, heads: tuple[str, ...]) -> None:
    """Nor with the header, which it could not send without a preflight."""
    port = open_app.listener.port
    filled = [head.format(port=port) for head in heads]
    host = f"Host: 127.0.0.1:{port}"
    for path in ("/admin/state", "/admin/settings", "/admin/cache/clear"):
        answer = send(open_app, path, host, JSON, "X-Admin: 1", *filled, method=method)
        assert answer.status_code == 403, (path, filled)
    preflight = send(open_app, "/admin/settings", host, *filled, method="OPTIONS")
    assert preflight.headers.get("access-control-allow-origin") is None


def test_a_name_that_was_rebound_is_not_our_own(open_app: App) -> None:
    port = open_app.listener.port
    heads = (f"Host: evil.example:{port}", f"Origin: http://evil.example:{port}")
    answer = send(open_app, "/admin/state", *heads, "X-Admin: 1", method="GET")
    assert answer.status_code == 403


def test_the_files_are_for_all_and_the_data_is_not(with_token: App) -> None:
    for path in page_files():
        answer = send(with_token, path, method="GET")
        assert answer.status_code == 200
        policy = answer.headers.get("content-security-policy") or ""
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert TOKEN.encode() not in answer.content
        tag = f"If-None-Match: {answer.headers.get('etag')}"
        assert send(with_token, path, tag, method="GET").status_code == 304
    assert send(with_token, "/admin/state", method="GET").status_code == 401
    wrong = send(
        with_token, "/admin/state", "Authorization: Bearer wrong", method="GET"
    )
    assert wrong.status_code == 403
    right = f"Authorization: Bearer {TOKEN}"
    assert send(with_token, "/admin/state", right, method="GET").status_code == 200
    assert send(with_token, "/admin/../../etc/passwd", method="GET").status_code in (
        401,
        404,
    )


def test_two_keys_open_what_they_are_for(model_folder: Callable[[str], Path]) -> None:
    """MLX_API_KEY what clients ask, ADMIN_TOKEN all that is not for clients."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "MLX_API_KEY": "a-client-key",
        "ADMIN_TOKEN": TOKEN,
    }
    admin, client = f"Authorization: Bearer {TOKEN}", "X-API-Key: a-client-key"
    with running_sidecar(settings, ready=False) as app:
        for path in ("/admin/models", "/native/memory", "/native/train"):
            assert send(app, path, admin, method="GET").status_code == 200
            assert send(app, path, client, method="GET").status_code == 403
        assert send(app, "/v1/models", client, method="GET").status_code == 200
        assert send(app, "/v1/models", admin, method="GET").status_code == 401


def test_a_code_is_good_once(with_token: App) -> None:
    assert send(with_token, "/admin/code").status_code == 401
    right = f"Authorization: Bearer {TOKEN}"
    code = send(with_token, "/admin/code", right).json()["code"]
    body = json.dumps({"code": code}).encode()
    first = send(with_token, "/admin/exchange", body=body)
    assert first.json() == {"key": TOKEN}
    assert send(with_token, "/admin/exchange", body=body).status_code == 403
    for bad in (b"[]", b"{}", b'{"code": 7}'):
        assert send(with_token, "/admin/exchange", body=bad).status_code == 400


def test_a_code_is_good_for_a_minute() -> None:
    now = [0.0]
    codes = AdminCodes(lambda: now[0])
    first, second = codes.issue("k"), codes.issue("k")
    now[0] = 59
    assert codes.exchange(first) == "k"
    now[0] = 61
    assert codes.exchange(second) is None
    many = [codes.issue(str(n)) for n in range(100)]
    assert codes.exchange(many[0]) is None
    assert codes.exchange(many[-1]) == "99"


def test_those_that_wait_have_places_and_those_that_run_have_none() -> None:
    states = ("decode", "queued", "prefill", "queued")
    views: list[Any] = [
        mock.Mock(state=state, as_dict=lambda state=state: {"state": state})
        for state in states
    ]
    rows = _with_places(views)
    assert [(row["state"], row["place"]) for row in rows] == [
        ("decode", 0), ("queued", 1), ("prefill", 0), ("queued", 2),
    ]  # fmt: skip
