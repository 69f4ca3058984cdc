"""Who may come in, and what the listener holds out against."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.config.settings import ServerConfig
from sidecar.core.errors import Forbidden, Unauthorized
from sidecar.server.access import check, check_admin, needs_key
from sidecar.server.page_files import page_files
from testkit.raw_http import (
    CLOSED,
    Answer,
    connect,
    eventually,
    exchange,
    read_answer,
    request,
)
from testkit.servers import num_left, running_sidecar, threads_of

REPO = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
KEY = "k-secret-é"
ORIGIN = "https://app.example"


def ask(app: App, data: bytes) -> Answer:
    return exchange(app.listener.port, data)


def chat_body(text: str = 'Say "hi"', **more: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "enable_thinking": False, "max_tokens": 8, **more}
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def locked(model_folder: Callable[[str], Path]) -> Iterator[App]:
    """A sidecar with a key, an allowed origin and an allowed host name."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "MLX_API_KEY": KEY,
        "CORS_ALLOW_ORIGINS": ORIGIN,
        "ALLOWED_HOSTS": "mac.lan",
        "MAX_CONNECTIONS": "4",
    }
    with running_sidecar(settings) as app:
        yield app


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:80", "192.168.1.5:8080",
        "[::1]", "[::1]:8080", "mac.lan", "Mac.Lan:8080", "",
    ],
)  # fmt: skip
def test_own_host_names(host: str) -> None:
    """Addresses, localhost and ALLOWED_HOSTS come in, with or without a port."""
    check(ServerConfig(allowed_hosts=("mac.lan",)), "GET", "/x", {"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "127.0.0.1.nip.example",
        "mac.lan.evil.example", "2130706433", "0x7f.1", "[::1", "[::1]x", "[localhost]",
        "localhost:80:80", "localhost:80x", "::1", "user@localhost", " localhost",
    ],
)  # fmt: skip
def test_foreign_host_names(host: str) -> None:
    """A name that a web page could have bound to this machine is refused."""
    with pytest.raises(Forbidden, match="ALLOWED_HOSTS"):
        check(ServerConfig(allowed_hosts=("mac.lan",)), "GET", "/x", {"host": host})


def test_a_containers_name_for_this_machine_is_no_pages() -> None:
    """A program there comes in; a browser might have been told another address."""
    headers = {"host": "host.docker.internal:8080"}
    check(ServerConfig(), "POST", "/v1/chat/completions", headers)
    page = {"origin": "http://host.docker.internal:8080", "x-admin": "1"}
    for more in (page, {"sec-fetch-site": "same-origin"}, {"user-agent": "Mozilla/5"}):
        for path in ("/admin/settings", "/v1/models"):
            with pytest.raises(Forbidden):
                check(ServerConfig(), "POST", path, headers | more)


@pytest.mark.parametrize("origin", ["null", "", "http://localhost", ORIGIN + ":1"])
def test_foreign_origins(origin: str) -> None:
    """Any Origin that is not listed is refused: browsers send it, clients do not."""
    config = ServerConfig(cors_allow_origins=(ORIGIN,))
    with pytest.raises(Forbidden, match="CORS_ALLOW_ORIGINS"):
        check(config, "GET", "/health", {"origin": origin})
    check(config, "GET", "/health", {"origin": ORIGIN})


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"authorization": "Bearer"}, {"authorization": "Bearer "},
        {"authorization": f"Bearer {KEY}x"}, {"authorization": f"Basic {KEY}"},
        {"authorization": KEY}, {"x-api-key": ""}, {"x-api-key": KEY.upper()},
        {"authorization": "Bearer wrong", "x-api-key": KEY},
    ],
)  # fmt: skip
def test_wrong_keys(headers: dict[str, str]) -> None:
    """No key, part of it, another scheme: 401."""
    with pytest.raises(Unauthorized, match="MLX_API_KEY"):
        check(ServerConfig(api_key=KEY), "GET", "/v1/models", headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
    ],
)
def test_right_keys(headers: dict[str, str]) -> None:
    """Both headers work, the scheme in any case."""
    check(ServerConfig(api_key=KEY), "GET", "/v1/models", headers)


@pytest.mark.parametrize(
    ("host", "needed"),
    [
        ("127.0.0.1", False), ("127.8.8.8", False), ("::1", False),
        ("localhost", False), ("0.0.0.0", True), ("::", True), ("192.168.1.2", True),
        ("", True), ("mac.lan", True),
    ],
)  # fmt: skip
def test_beyond_loopback_a_key_is_needed(host: str, needed: bool) -> None:
    """Only an address that no other machine reaches may go without."""
    assert needs_key(host) is needed


@pytest.mark.parametrize("key", [None, "k"])
def test_beyond_loopback_a_clients_key_opens_nothing_behind_the_scenes(
    key: str | None,
) -> None:
    """ADMIN_TOKEN alone does."""
    config = ServerConfig(host="0.0.0.0", api_key=key)
    with pytest.raises(Forbidden, match="ADMIN_TOKEN"):
        check_admin(config, {"authorization": "Bearer k"})
    check_admin(ServerConfig(host="127.0.0.1", api_key=key), {})


def test_start_beyond_loopback_without_a_key_is_refused(tmp_path: Path) -> None:
    """`--host 0.0.0.0` exits 2 and names both ways out."""
    command = [sys.executable, "-m", "sidecar", "--host", "0.0.0.0", "--port", "0"]
    command += ["--env-file", str(tmp_path / ".env")]
    ended = subprocess.run(
        command, cwd=REPO, env={}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "MLX_API_KEY" in ended.stderr
    assert "127.0.0.1" in ended.stderr
    assert "Traceback" not in ended.stderr


def is_idle(app: App) -> bool:
    """Whether no connection is held."""
    return app.listener.places.num_taken == 0


def test_every_route_but_health_needs_the_key(locked: App) -> None:
    """Each path of the table, and paths that do not exist: 401 without the key."""
    paths = [*locked.listener.routes._table, "/v1/cancel/x", "/nothing"]
    for path in paths:
        for method in ("GET", "POST", "HEAD", "DELETE"):
            data = request(path, b"{}", method=method)
            port = locked.listener.port
            answer = exchange(port, data, head=method == "HEAD")
            assert eventually(lambda: is_idle(locked))  # four may be open at once
            if path in ("/health", "/ready", *page_files()):
                assert answer.status in (200, 405)
                continue
            if path == "/admin/exchange":  # a code is its key, and this has none
                assert answer.status in (400, 405)
                continue
            assert answer.status == 401, (method, path)
            assert answer.header("www-authenticate") == "Bearer"
            assert KEY not in answer.body.decode()


def test_the_key_opens(locked: App) -> None:
    """With the key in either header a chat is answered."""
    for header in (f"Authorization: Bearer {KEY}", f"X-API-Key: {KEY}"):
        data = request(CHAT, chat_body(), (header,))
        assert ask(locked, data).status == 200


def test_a_browser_app_of_an_allowed_origin_gets_through(locked: App) -> None:
    """Its preflight needs no key and lists the headers; its request needs one."""
    headers = (f"Origin: {ORIGIN}", "Access-Control-Request-Headers: authorization")
    preflight = ask(locked, request(CHAT, headers=headers, method="OPTIONS"))
    assert preflight.status == 204
    assert preflight.header("access-control-allow-origin") == ORIGIN
    allowed = preflight.header("access-control-allow-headers") or ""
    assert allowed == "authorization"
    methods = preflight.header("access-control-allow-methods") or ""
    assert {"GET", "POST", "DELETE"} <= set(methods.split(", "))
    assert ask(locked, request(CHAT, chat_body(), headers[:1])).status == 401
    keyed = (headers[0], f"Authorization: Bearer {KEY}")
    answer = ask(locked, request(CHAT, chat_body(), keyed))
    assert answer.status == 200
    assert answer.header("access-control-allow-origin") == ORIGIN
    assert answer.header("vary") == "Origin"
    assert answer.header("access-control-expose-headers") == "Retry-After, X-Request-ID"


def test_a_page_of_the_network_is_told_that_it_may_come(locked: App) -> None:
    """Browsers ask so before they let it ask this machine."""
    asks = ("Origin: " + ORIGIN, "Access-Control-Request-Private-Network: true")
    preflight = ask(locked, request(CHAT, headers=asks, method="OPTIONS"))
    assert preflight.header("access-control-allow-private-network") == "true"
    plain = ask(locked, request(CHAT, headers=asks[:1], method="OPTIONS"))
    assert plain.header("access-control-allow-private-network") is None


@pytest.mark.parametrize("asked", ["x-stainless-os, content-type", "a\tb", ""])
def test_a_preflight_lists_the_headers_that_are_asked_for(
    locked: App, asked: str
) -> None:
    """An SDK has some of its own; what is no list of names is not said again."""
    headers = (f"Origin: {ORIGIN}", f"Access-Control-Request-Headers: {asked}")
    preflight = ask(locked, request(CHAT, headers=headers, method="OPTIONS"))
    allowed = preflight.header("access-control-allow-headers") or ""
    assert (allowed == asked) == asked.startswith("x-")
    assert "content-type" in allowed.lower()


def test_a_preflight_from_elsewhere_is_refused(locked: App) -> None:
    """A foreign page learns nothing, and gets no CORS header."""
    headers = ("Origin: https://evil.example",)
    answer = ask(locked, request(CHAT, headers=headers, method="OPTIONS"))
    assert answer.status == 403
    assert answer.header("access-control-allow-origin") is None


def test_a_host_name_can_be_allowed(locked: App) -> None:
    """ALLOWED_HOSTS lets a name in that would be 403."""
    assert ask(locked, request("/health", host="mac.lan:8080")).status == 200
    assert ask(locked, request("/health", host="other.lan")).status == 403


@pytest.mark.parametrize("kind", ["length", "chunked", "astronomic"])
def test_a_large_body_is_refused_before_it_comes(app: App, kind: str) -> None:
    """413 as soon as its size is known, with none of it sent."""
    over = (app.config.server.max_body_mb << 20) + 1
    headers: dict[str, tuple[str, ...]] = {
        "length": (f"Content-Length: {over}",),
        "chunked": ("Transfer-Encoding: chunked",),
        "astronomic": ("Content-Length: " + "9" * 4000,),
    }
    data = request(CHAT, headers=headers[kind], method="POST")
    if kind == "chunked":
        data += b"%x\r\n" % over
    answer = ask(app, data)
    assert answer.status == 413
    assert f"{over - 1} bytes" in answer.json["error"]["message"]


def test_a_large_body_that_comes_all_the_same(app: App) -> None:
    """A client that does not wait still reads the 413."""
    over = (app.config.server.max_body_mb << 20) + 1
    data = request(CHAT, headers=(f"Content-Length: {over}",), method="POST")
    assert ask(app, data + b"x" * (1 << 20)).status == 413


def test_a_request_that_announces_no_body_has_none(app: App) -> None:
    """As `curl -X POST` sends it: an order is carried out, a question is refused."""
    assert ask(app, request("/admin/cache/clear", method="POST")).status == 200
    answer = ask(app, request(CHAT, method="POST"))
    assert answer.status == 400
    assert "JSON" in answer.json["error"]["message"]


def test_a_body_of_64_chunks_is_whole(app: App) -> None:
    """Chunked bodies work, extensions, trailers and all."""
    body = chat_body()
    chunks = b"".join(b"%X;ext=1\r\n%c\r\n" % (1, byte) for byte in body)
    data = request(CHAT, headers=("Transfer-Encoding: Chunked",), method="POST")
    assert ask(app, data + chunks + b"0\r\nTrailer: x\r\n\r\n").status == 200


def test_keep_alive_serves_many_requests_on_one_connection(app: App) -> None:
    """Whole answers, streams and lists, one after the other."""
    with connect(app.listener.port) as connection, connection.makefile("rb") as stream:
        for data in (
            request("/health"),
            request(CHAT, chat_body()),
            request(CHAT, chat_body(stream=True)),
            request("/v1/models"),
        ):
            connection.sendall(data)
            answer = read_answer(stream)
            assert answer.status == 200
            assert answer.header("connection") is None
        connection.sendall(request("/health", headers=("Connection: close",)))
        assert read_answer(stream).header("connection") == "close"
        assert read_answer(stream) == CLOSED


def test_pipelined_requests_are_answered_in_order(app: App) -> None:
    """Three requests in one packet, three answers."""
    data = request("/health") + request(CHAT, chat_body()) + request("/v1/models")
    with connect(app.listener.port) as connection, connection.makefile("rb") as stream:
        connection.sendall(data)
        answers = [read_answer(stream) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert "choices" in answers[1].json
    assert answers[2].json["object"] == "list"


def test_head_has_the_head_of_get_and_no_body(app: App) -> None:
    """The same status and length, then the next answer at once."""
    get = ask(app, request("/v1/models"))
    with connect(app.listener.port) as connection, connection.makefile("rb") as stream:
        connection.sendall(request("/v1/models", method="HEAD") + request("/health"))
        head = read_answer(stream, head=True)
        assert head.status == 200
        assert head.header("content-length") == str(len(get.body))
        assert read_answer(stream).json["status"] == "ok"


def test_http_1_0_clients_get_no_chunks(app: App) -> None:
    """They do not know them: a stream ends with the connection."""
    data = request(CHAT, chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = ask(app, data)
    assert answer.header("transfer-encoding") is None
    assert answer.body.startswith(b"data: {")
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_a_request_id_is_kept_or_made(app: App) -> None:
    """The client's own comes back; a bad one is replaced; it is in error bodies."""
    given = ask(app, request("/nothing", headers=("X-Request-ID: my-1.2:3_4",)))
    assert given.header("x-request-id") == "my-1.2:3_4"
    assert given.json["request_id"] == "my-1.2:3_4"
    for bad in ("a b", "x" * 129, "é", ""):
        made = ask(app, request("/health", headers=(f"X-Request-ID: {bad}",)))
        assert len(made.header("x-request-id") or "") == 24


def test_short_paths_and_slashes(app: App) -> None:
    """/models and /chat/completions without /v1, and with a slash at the end."""
    for path in ("/models", "/v1/models/", "/models/?x=1", "//v1/models"):
        assert ask(app, request(path)).json["object"] == "list"
    for path in ("/chat/completions", CHAT + "/"):
        assert ask(app, request(path, chat_body())).status == 200


def test_a_model_of_another_kind_says_so(app: App) -> None:
    """A 400 that names the model; it is no server error."""
    for path, body in (
        ("/v1/embeddings", b'{"input": "a"}'),
        ("/v1/rerank", b'{"query": "a", "documents": ["b"]}'),
    ):
        answer = ask(app, request(path, body))
        assert answer.status == 400
        assert answer.json["error"]["param"] == "model"


def test_a_client_that_does_not_read_loses_its_stream(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write into full buffers ends after its limit, and the engine is free."""
    monkeypatch.setattr("sidecar.server.connection._WRITE_S", 0.3)
    body = chat_body(
        max_tokens=30_000, n=8, stream=True, logprobs=True, top_logprobs=20
    )
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings) as app, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", app.listener.port))
        connection.sendall(request(CHAT, body))
        assert eventually(lambda: app.pool.num_leases == 1)
        assert eventually(lambda: app.pool.num_leases == 0)
        assert num_left(app) == 1


HOSTILE = {
    "classes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARK') }}",
    "include": "{% include '/etc/passwd' %}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "attr filter": "{{ (messages|attr('__class__')).__mro__ }}",
    "function code": "{{ raise_exception.__code__.co_filename.x }}",
    "mutation": "{{ messages.append({'role': 'user'}) }}",
    "endless": "{% for i in range(10**9) %}x{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "no template": "{{ unclosed",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_chat_template_reaches_nothing(
    case: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whatever it tries, the sandbox says no: a 400, and nothing is touched."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder("dense"), folder)
    mark = tmp_path / "mark"
    template = HOSTILE[case].replace("MARK", str(mark))
    (folder / "chat_template.jinja").write_text(template)
    with running_sidecar({"MODEL_PATH": str(folder)}) as app:
        answer = ask(app, request(CHAT, chat_body()))
    assert not mark.exists()
    assert answer.status == 400
    error = answer.json["error"]
    assert error["param"] == "messages"
    assert "chat template" in error["message"]
    assert "root:" not in answer.body.decode()


def test_connections_leave_no_threads(app: App) -> None:
    """Fifty short connections, and then as many threads as before."""
    before = threads_of(app)
    for _ in range(50):
        assert ask(app, request("/health")).status == 200
    assert eventually(lambda: threads_of(app) <= before)


@pytest.mark.parametrize("host", ["0.0.0.0:8080", "[::ffff:127.0.0.1]:8080"])
def test_a_browser_that_does_not_say_for_whom_stays_out(host: str) -> None:
    """An image of a page: to such addresses no header tells whose."""
    browser = {"host": host, "user-agent": "Mozilla/5.0 (X11) Chrome/156"}
    with pytest.raises(Forbidden, match="127.0.0.1"):
        check(ServerConfig(), "GET", "/admin/cache", browser)
    check(ServerConfig(), "GET", "/admin/cache", {"host": host})
    keyed = {**browser, "authorization": "Bearer k"}
    check(ServerConfig(api_key="k"), "GET", "/v1/models", keyed)
