"""The gate before a real LiteLLM: a browser's page, keys, and who answers there."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from litellm_mlx.access import _PAGES, _PUBLIC
from litellm_mlx.identity import challenge, is_proven
from sidecar.app import App
from testkit.cloud import Cloud, cloud_config, running_cloud
from testkit.proxy import Proxy, running_proxy
from testkit.servers import running_sidecar

KEY = "sk-of-this-user"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SAID = [{"role": "user", "content": "?"}]
ASKED = {"model": "cloud", "max_tokens": 4, "messages": SAID}
PAGE = Path(__file__).with_name("hostile_page.html")
_BROWSER_S = 240


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    """Counts; answers all alike."""
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture(scope="module")
def target() -> Iterator[App]:
    """A sidecar of its own: nobody else asks it."""
    with running_sidecar() as app:
        yield app


@pytest.fixture(scope="module")
def keyless(
    target: App, cloud: Cloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("keyless")
    with running_proxy(target.url, folder, own=cloud_config(cloud)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def keyed(
    target: App, cloud: Cloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("keyed")
    own = cloud_config(cloud, master_key=KEY)
    with running_proxy(target.url, folder, own=own) as proxy:
        yield proxy


def post(proxy: Proxy, path: str, headers: dict[str, str]) -> httpx.Response:
    bare = {"authorization": "", **headers}  # not the key that the fixture's client has
    return proxy.http.post(path, json=ASKED, headers=bare)


def test_the_user_reaches_his_cloud_and_a_page_does_not(
    keyless: Proxy, cloud: Cloud
) -> None:
    """A program without a key works as before; the same from a page does not run."""
    before = len(cloud.asked)
    assert "SPENT" in post(keyless, "/v1/chat/completions", {}).text
    assert len(cloud.asked) == before + 1
    for path in ("/v1/chat/completions", "/v1/messages"):
        for origin in ("https://evil.example", "null"):
            answer = post(
                keyless, path, {"origin": origin, "content-type": "text/plain"}
            )
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        rebound = post(keyless, path, {"host": "evil.example:4000"})
        assert rebound.status_code == 403
    assert len(cloud.asked) == before + 1


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer any"}])
def test_a_missing_and_a_wrong_key_are_401_in_each_dialect(
    keyed: Proxy, headers: dict[str, str]
) -> None:
    """LiteLLM alone: 500 and 400, with tracebacks on the terminal."""
    chat = post(keyed, "/v1/chat/completions", headers)
    assert (chat.status_code, chat.json()["error"]["code"]) == (401, "invalid_api_key")
    messages = post(keyed, "/v1/messages", headers)
    assert messages.status_code == 401
    assert messages.json()["error"]["type"] == "authentication_error"
    google = post(keyed, "/v1beta/models/cloud:generateContent", headers)
    assert (google.status_code, google.json()["error"]["status"]) == (
        401, "UNAUTHENTICATED",
    )  # fmt: skip
    for path in ("/v1/models", "/prompts/test", "/anthropic/v1/messages", "/health"):
        assert (
            keyed.http.get(path, headers={"authorization": "", **headers}).status_code
            == 401
        )


@pytest.mark.parametrize("stream", [False, True])
def test_interactions_are_not_served_by_local_models(
    keyed: Proxy, cloud: Cloud, stream: bool
) -> None:
    """LiteLLM lost calls, past turns and the line between thinking and answer."""
    before = len(cloud.asked)
    body = {"model": "local", "input": "hi", "previous_interaction_id": "x"}
    answer = keyed.http.post(
        "/v1beta/interactions",
        json={**body, "stream": stream},
        headers={"authorization": f"Bearer {KEY}"},
    )
    assert answer.status_code == 400
    assert "interactions are not served" in answer.json()["error"]["message"]
    assert len(cloud.asked) == before


@pytest.mark.parametrize("key", ["", f"Bearer {KEY}"], ids=["no key", "the key"])
def test_a_foreign_host_is_refused_on_every_route(keyed: Proxy, key: str) -> None:
    """It was let in to all that needs no key, and with the key to all."""
    for path in ("/", "/health/liveliness", "/ui/", "/openapi.json", "/v1/models"):
        headers = {"host": "rebound.example:4000", "authorization": key}
        answer = keyed.http.get(path, headers=headers)
        assert answer.status_code == 403, path
        assert "ALLOWED_HOSTS" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/key/generate"), ("GET", "/key/info")]
)
def test_keys_without_a_database_say_what_they_need(
    keyed: Proxy, method: str, path: str
) -> None:
    """It was `Internal Server Error`, and a traceback on the terminal."""
    headers = {"authorization": f"Bearer {KEY}"}
    answer = keyed.http.request(method, path, json={}, headers=headers)
    assert answer.status_code == 501, answer.text
    assert "DATABASE_URL" in answer.json()["error"]["message"]


def test_the_sdks_know_what_it_means(keyed: Proxy) -> None:
    """And what to do stands in the message."""
    plain = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="any", max_retries=0)
    with plain, pytest.raises(openai.AuthenticationError, match="LITELLM_MASTER_KEY"):
        plain.models.list()
    claude = anthropic.Anthropic(base_url=keyed.url, api_key="any", max_retries=0)
    with claude, pytest.raises(anthropic.AuthenticationError, match="MASTER_KEY"):
        claude.messages.create(**ASKED)  # type: ignore[call-overload]
    mine = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0)
    with mine:
        assert {model.id for model in mine.models.list()} >= {"local", "cloud"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("messages", "x"),
        ("response_format", 5),
        ("timeout", "x"),
        ("stream_options", 3),
    ],
)
def test_what_litellm_stumbles_over_is_400(
    keyless: Proxy, name: str, value: object
) -> None:
    """Named, without a traceback in it."""
    body = {**ASKED, "model": "local", name: value}
    answer = keyless.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"{name} must be" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_body_that_is_too_much_never_reaches_litellm(
    keyless: Proxy, path: str
) -> None:
    """It would be parsed on the event loop, and answered with 500."""
    headers = {"content-type": "application/json"}
    for body, status in (
        (b"[]", 400), (b"3", 400), (b"null", 400), (b'"x"', 400),
        (b'{"a": [' + b"[]," * 1_500_000 + b"[]]}", 413),
        (b'{"a": "' + b"x" * (65 << 20) + b'"}', 413),
    ):  # fmt: skip
        answer = keyless.http.post(f"/v1/{path}", content=body, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_a_child_proves_who_it_is(keyless: Proxy, target: App) -> None:
    """Without the launcher's secret there is no proof, whatever is asked."""
    for url in (f"{keyless.url}/health/liveliness", f"{target.url}/health"):
        answer = httpx.get(url, headers=challenge(), trust_env=False)
        assert answer.status_code == 200
        assert not is_proven("a secret", answer)


def routes_of(keyed: Proxy) -> list[list[str]]:
    """Every route that LiteLLM tells of: method and path."""
    described = keyed.http.get("/openapi.json").json()["paths"]
    filled = {path: re.sub(r"\{[^}]*\}", "x", path) for path in described}
    return [
        [method.upper(), filled[path]]
        for path, methods in described.items()
        for method in methods
    ]


@pytest.mark.skipif(
    BROWSER is None, reason="needs a browser: apt install chromium-headless-shell"
)
def test_a_page_in_a_real_browser_gets_nothing(
    keyless: Proxy, keyed: Proxy, target: App, cloud: Cloud, tmp_path: Path
) -> None:
    """
    By fetch, form, image, event source and web socket, on every route of both ports.

    From another origin, from a name that was rebound to this machine, and by an address
    to which browsers say nothing of the page.
    """
    routes = routes_of(keyed)
    assert len(routes) > 300
    own = [["GET", path] for path in target.listener.routes._table]  # type: ignore[attr-defined]
    own += [["POST", path] for _method, path in own]
    ports = ((keyless.url, routes), (keyed.url, routes), (target.url, own))
    targets = [
        [url.replace("127.0.0.1", name), listed]
        for url, listed in ports
        for name in ("127.0.0.1", "rebound.test", "0.0.0.0")
    ]
    assert keyless.http.post("/v1/chat/completions", json=ASKED | {"model": "local"})
    before = len(cloud.asked), num_answers(target)
    assert before[1] > 0
    lines = [len(proxy.log.read_text().splitlines()) for proxy in (keyless, keyed)]
    report = browse({"body": json.dumps(ASKED), "targets": targets}, tmp_path)
    assert report["tried"] > 2 * len(routes)
    assert report["read"] == []
    assert (len(cloud.asked), num_answers(target)) == before
    let_in = []
    for proxy, seen in zip((keyless, keyed), lines, strict=True):
        log = "\n".join(proxy.log.read_text().splitlines()[seen:])
        answers = re.findall(r'"[A-Z]+ (\S+) HTTP/1\.1" (\d+)', log)
        assert len(answers) > len(routes)
        let_in.append({path for path, code in answers if code not in ("401", "403")})
    assert let_in[0] == set()
    # Pages that hold nothing, by a name that the browser does not call local.
    assert all(_PUBLIC.fullmatch(path) or _PAGES.fullmatch(path) for path in let_in[1])


def num_answers(app: App) -> float:
    """Tokens that a sidecar has generated."""
    text = httpx.get(f"{app.url}/metrics", trust_env=False).text
    name = r'^mlx_token_throughput_total\{kind="generated"\} (\S+)'
    return sum(
        map(float, re.findall(name, text, re.MULTILINE))
    )  # none before the first


def browse(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Have a browser open the hostile page with a plan; what the page could do."""
    reports: list[dict[str, Any]] = []
    is_done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(plan) if self.path == "/plan" else PAGE.read_text()
            kind = "application/json" if self.path == "/plan" else "text/html"
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(data.encode())

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            reports.append(json.loads(self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()
            is_done.set()

        def log_message(self, *_arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu",
        "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP *.test 127.0.0.1", "--remote-debugging-port=0",
        f"http://evil.test:{server.server_port}/",
    ]  # fmt: skip
    log = (folder / "browser.log").open("wb")
    # A group of its own: Debian's command is a script that starts the browser.
    with (
        log,
        subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            assert is_done.wait(_BROWSER_S), (folder / "browser.log").read_text()[
                -2000:
            ]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
            server.shutdown()
            server.server_close()
            thread.join(10)
    return reports[0]
