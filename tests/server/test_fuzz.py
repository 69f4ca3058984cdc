"""
Malformed requests by the hundred against a running sidecar.

Each must get a 4xx that names the fault, or a closed connection: never a 5xx, never a
hang, never an answer to what was smuggled in behind it.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from sidecar.app import App
from sidecar.server import connection as connection_module
from testkit.raw_http import (
    CLOSED,
    Answer,
    connect,
    eventually,
    exchange,
    exchange_all,
    read_answer,
    request,
)
from testkit.servers import running_sidecar, threads_of

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": 'Say "hi"'}],
    "max_tokens": 4,
    "enable_thinking": False,
}


@pytest.fixture(scope="module")
def server(model_folder: Callable[[str], Path]) -> Iterator[App]:
    """A sidecar that takes bodies of 1 MB."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "MAX_BODY_MB": "1"}
    with running_sidecar(settings) as app:
        yield app


@pytest.fixture(autouse=True)
def leaves_no_trace(server: App) -> Iterator[None]:
    """After each test: no thread more, no lease open, and a good request works."""
    threads = threads_of(server)
    yield
    good = post(server, HELLO)
    assert (good.status, good.json["usage"]["completion_tokens"]) == (200, 4)
    assert eventually(lambda: threads_of(server) <= threads)
    assert server.pool.num_leases == 0


def post(app: App, body: Any, path: str = CHAT) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return exchange(app.listener.port, request(path, data))


def assert_refused(answer: Answer, param: str | None = None) -> None:
    """A 4xx in problem form that says what is wrong, and where."""
    if answer == CLOSED and param is None:
        return
    assert 400 <= answer.status < 500, answer
    assert answer.header("content-type") == "application/problem+json"
    body = answer.json
    assert body["error"]["message"].strip()
    assert body["status"] == answer.status
    assert "Traceback" not in body["detail"]
    if param is not None:
        assert body["error"]["param"] is not None, body
        assert body["error"]["param"].startswith(param), body
        assert body["error"]["param"] in body["error"]["message"]


def test_broken_json(server: App) -> None:
    """A body with bytes changed, lost or doubled, if it is no JSON any more."""
    chance = random.Random(1)
    good = json.dumps({**HELLO, "tools": [], "stop": ["a"], "top_p": 0.5}).encode()
    sent = 0
    while sent < 300:
        body = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(body))
            change = chance.choice(["flip", "cut", "double", "end"])
            if change == "flip":
                body[at] = chance.randrange(256)
            elif change == "cut":
                del body[at]
            elif change == "double":
                body[at:at] = body[at : at + chance.randint(1, 9)]
            else:
                del body[max(1, at) :]
        try:
            orjson.loads(bytes(body))
        except orjson.JSONDecodeError:
            sent += 1
            answer = post(server, bytes(body))
            assert_refused(answer)
            assert "JSON" in answer.json["error"]["message"]


ANY: list[Any] = [True, 3, -7.5, "text", [], [1], {}, {"a": 1}]


def wrong(*right: type) -> list[Any]:
    return [value for value in ANY if type(value) not in right]


NUMBER = wrong(int, float)
FIELDS: dict[str, list[Any]] = {
    "model": wrong(str),
    "messages": ANY,
    "temperature": [*NUMBER, -0.1, 101, 1e300],
    "top_p": [*NUMBER, -0.1, 1.1],
    "top_k": [*NUMBER, -7.5, -2, 1e300],
    "min_p": [*NUMBER, -1, 1.01],
    "repetition_penalty": [*NUMBER, 0, -1],
    "repetition_context_size": [*NUMBER, 0, 0.5],
    "presence_penalty": [*NUMBER, 101],
    "frequency_penalty": [*NUMBER, -101],
    "logit_bias": [*wrong(dict), {"a": 1}, {"1": "a"}, {"3071999": 1}],
    "seed": [*NUMBER, -7.5, 1 << 64, -(1 << 64)],
    "n": [*NUMBER, 0, -1, 100, 129, 1e300],
    "max_tokens": [*NUMBER, 0, -2, 1 << 40, 1e300],
    "max_completion_tokens": [*NUMBER, 0, 1.5],
    "stop": [True, 3, -7.5, [1], {}, [None], ["a"] * 65, ["a" * 1025]],
    "logprobs": wrong(bool),
    "top_logprobs": [*NUMBER, -1, 21, 0.5],
    "stream": wrong(bool),
    "stream_options": [*wrong(dict), {"include_usage": "yes"}],
    "chat_template_kwargs": [*wrong(dict), {"tokenize": True}],
    "tools": [*wrong(list), [1], [{"type": "function"}], [{"function": {"name": 1}}]],
    "functions": [*wrong(list), [1], [{}]],
    "tool_choice": [True, 3, -7.5, "text", [1], {"a": 1}, {"function": {"name": "f"}}],
}


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_values_of_a_chat_field(server: App, field: str) -> None:
    """Each value of a wrong type or range is refused, and param names the field."""
    for value in FIELDS[field]:
        assert_refused(post(server, {**HELLO, field: value}), field)


COMPLETION_FIELDS = {
    **{k: v for k, v in FIELDS.items() if k in ("model", "n", "stop", "seed")},
    "prompt": [
        *wrong(str),
        [],
        [[]],
        ["a", 1],
        [-1],
        [1 << 64],
        [3071999],
        [[1 << 40]],
    ],
    "echo": wrong(bool),
    "logprobs": [*NUMBER, -1, 21],
}


@pytest.mark.parametrize("field", COMPLETION_FIELDS)
def test_wrong_values_of_a_completion_field(server: App, field: str) -> None:
    """The same for raw completions."""
    for value in COMPLETION_FIELDS[field]:
        if field == "prompt" and value == [1]:
            continue  # a token id
        body = {"prompt": "a", "max_tokens": 2, field: value}
        answer = post(server, body, "/v1/completions")
        assert_refused(answer)
        assert answer.json["error"]["param"].startswith(field)


MESSAGES: list[Any] = [
    {}, {"role": 1}, {"role": "x"}, {"role": "user", "content": 1},
    {"role": "user", "content": {}}, {"role": "user", "content": [1]},
    {"role": "user", "content": [{"type": 1}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "user", "content": [{"type": "text", "text": []}]},
    {"role": "assistant", "tool_calls": 1}, {"role": "assistant", "tool_calls": [1]},
    {"role": "assistant", "tool_calls": [{"function": 1}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": []}}]},
    {"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]},
    {"role": "assistant", "thinking_blocks": "x"},
    {"role": "assistant", "thinking_blocks": [{"thinking": 1}]},
    {"role": "tool", "tool_call_id": []},
]  # fmt: skip


def test_wrong_messages(server: App) -> None:
    """A fault in a message is named by the message's place."""
    for message in MESSAGES:
        body = {"messages": [*HELLO["messages"], message]}
        assert_refused(post(server, body), "messages[1]")


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "0x10", "1_000", "+1",
           "01", "9" * 400, "-" + "9" * 400, "1e308", "-1e308", "1.0e", "--1",
           "."]  # fmt: skip
NUMERIC = ["temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens",
           "presence_penalty", "repetition_penalty", "top_logprobs"]  # fmt: skip


@pytest.mark.parametrize("field", NUMERIC)
def test_numbers_no_one_means(server: App, field: str) -> None:
    """NaN, infinities and numbers of 400 digits are refused wherever a number goes."""
    for text in NUMBERS:
        body = json.dumps({**HELLO, field: "@"}).replace('"@"', text)
        assert_refused(post(server, body.encode()))


def test_bad_utf8(server: App) -> None:
    """Bytes that are no UTF-8."""
    chance = random.Random(2)
    good = json.dumps(HELLO).encode()
    bad = [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88", b"\xe2\x82"]
    for _ in range(60):
        at = good.index(b"Say") + chance.randrange(3)
        body = good[:at] + chance.choice(bad) + good[at:]
        assert_refused(post(server, body))


@pytest.mark.parametrize(
    "half", ["\\ud83d", "\\uDE00", "\\\\\\udbff", "\\ud83d\\ud83d"]
)
def test_half_a_surrogate_pair(server: App, half: str) -> None:
    """JavaScript sends what it cut in the middle of a sign; the rest is read."""
    body = json.dumps(HELLO).replace("Say", f"Say {half}\\ud83d\\ude00")
    assert post(server, body.encode()).status == 200


@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_deep_nesting(server: App, depth: int) -> None:
    """Nesting without end is refused, in whatever field; in a text it is text."""
    opened, closed = "[" * depth, "]" * depth
    objects = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "@"}}
    for deep in (f"{opened}{closed}", objects, opened):
        for field in ("messages", "temperature", "metadata", "tools", "x", "stop"):
            body = json.dumps({**HELLO, field: "@"}).replace('"@"', deep)
            assert_refused(post(server, body.encode()))
        assert_refused(post(server, deep.encode()))
        message = {"role": "assistant", "tool_calls": [call]}
        body = json.dumps({"messages": [message]}).replace('"@"', deep)
        assert_refused(post(server, body.encode()))
    text = json.dumps(message).replace('"@"', json.dumps(opened + closed))
    message = json.loads(text)
    asked = {"messages": [*HELLO["messages"], message, *HELLO["messages"]]}
    # A call's arguments are a text: one that nobody can read is one nevertheless.
    answer = post(server, {**asked, "max_tokens": 1})
    assert answer.status == (200 if depth < 10_000 else 400)  # the context ends


def test_bodies_that_end_early(server: App) -> None:
    """A client that promises more than it sends gets its connection closed."""
    body = json.dumps(HELLO).encode()
    for length in range(0, len(body), 2):
        data = request(CHAT, body)[: -len(body)] + body[:length]
        answer = exchange(server.listener.port, data, end=True)
        assert answer == CLOSED


def test_wrong_methods_and_paths(server: App) -> None:
    """404 and 405, however odd the name; HEAD without a body."""
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "BREW", "get", "X" * 99, "HEAD"]
    paths = [
        "/nothing", "/v1", "/v1/", "/v1/chat", "/v1/chat/completions/x", "/v2/models",
        "/../etc/passwd", "/%2e%2e/", "/\x00", "/é", "//", "?", "http://[::1", "/" * 99,
        "*", "/v1/cancel/a/b", "/metrics/x", "/health%00",
    ]  # fmt: skip
    for method in methods:
        for path in paths:
            if method in ("GET", "HEAD") and path in ("//", "/" * 99, "?"):
                continue  # these are `/`
            data = request(path, method=method)
            head = method == "HEAD"
            answer = exchange(server.listener.port, data, head=head)
            if head:
                assert 400 <= answer.status < 500
            else:
                assert_refused(answer)
    for method, path in [("POST", "/health"), ("GET", CHAT), ("DELETE", "/v1/models")]:
        data = request(path, b"{}", method=method)
        assert exchange(server.listener.port, data).status == 405


BAD_CHUNKS = [
    b"", b"\r\n", b"x\r\n", b"-1\r\n", b"-5\r\nhello\r\n", b"+5\r\nhello\r\n",
    b"0x5\r\nhello\r\n", b"1_0\r\n", b"5\nhel", b"5\r\nhello world\r\n0\r\n\r\n",
    b"fffffffff\r\n", b"ffffffff\r\n", b"5;" + b"a" * 2000, b"5\r\nhelloXX0\r\n\r\n",
    b"5 5\r\nhello\r\n0\r\n\r\n", b"\x00\r\n", b"5\r\nhello\r\n", b"5\r\nhello\r\n0",
    b"\xb2\r\n", b"5\r\nhello  \r\n0\r\n\r\n", b"0\r\n" + b"a: b\r\n" * 200 + b"\r\n",
]  # fmt: skip


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_bad_chunked_bodies(server: App, method: str) -> None:
    """Sizes with signs, underscores, no digits or too many; chunks that lie."""
    path = CHAT if method == "POST" else "/health"
    head = request(path, headers=("Transfer-Encoding: chunked",), method=method)
    for chunks in BAD_CHUNKS:
        answer = exchange(server.listener.port, head + chunks, end=True)
        assert_refused(answer)


BAD_FRAMING = [
    ("Transfer-Encoding: gzip",), ("Transfer-Encoding: chunked, chunked",),
    ("Transfer-Encoding: identity",), ("Transfer-Encoding:",),
    ("Transfer-Encoding: xchunked",), ("Transfer-Encoding: chunked\x0b",),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: 5"),
    ("Content-Length: 5", "Transfer-Encoding: chunked"),
    ("Content-Length: 5", "Content-Length: 6"),
    ("Content-Length: 5", "Content-Length: 5"), ("Content-Length: 5, 5",),
    ("Content-Length: -5",), ("Content-Length: +5",), ("Content-Length: 5.0",),
    ("Content-Length: 0x5",), ("Content-Length: 5_0",), ("Content-Length: ²",),
    ("Content-Length:",), ("Content-Length: five",), ("Content-Length: 5 5",),
    ("Content-Length : 5",), ("Content-Length\t: 5",), ("Content-Length: 5\r\n 5",),
    (" Content-Length: 5",), ("\tfolded: 1",), ("no colon here",), (": no name",),
    ("From me", "Content-Length: 5"), ("Host: other",), ("Content-Length: 5", "GET /"),
]  # fmt: skip


def test_nothing_is_smuggled_in(server: App) -> None:
    """Where two readers could differ on a body's end, one refusal is all that comes."""
    smuggled = request("/v1/models")
    for method in ("POST", "GET", "OPTIONS", "PUT"):
        for headers in BAD_FRAMING:
            data = request(CHAT, headers=headers, method=method)
            for body in (b"hello", b"5\r\nhello\r\n0\r\n\r\n"):
                answers = exchange_all(server.listener.port, data + body + smuggled)
                assert len(answers) <= 1, (method, headers, answers)
                assert_refused(answers[0] if answers else CLOSED)


def test_a_body_nobody_reads_is_not_the_next_request(server: App) -> None:
    """Methods without a body: one that comes all the same is read as one."""
    inner = request("/v1/models", method="DELETE")
    for method in ("GET", "OPTIONS", "HEAD"):
        data = request("/health", inner, method=method)
        chunked = request("/health", headers=("Transfer-Encoding: chunked",),
                          method=method)  # fmt: skip
        chunked += b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner)
        for one in (data, chunked):
            with connect(server.listener.port) as connection:
                connection.sendall(one + request("/v1/models"))
                with connection.makefile("rb") as stream:
                    first = read_answer(stream, head=method == "HEAD")
                    second = read_answer(stream)
            assert first.status in (200, 204)
            assert (second.status, second.json["object"]) == (200, "list")


def test_heads_that_are_too_large(server: App) -> None:
    """Long lines, many lines, long paths: 431."""
    for headers in (
        ("X: " + "a" * 66_000,),
        tuple(f"X-{i}: 1" for i in range(200)),
        tuple(f"X-{i}: " + "a" * 1000 for i in range(70)),
        ("X" * 65_530 + ": 1",),
    ):
        answer = exchange(server.listener.port, request("/health", headers=headers))
        assert_refused(answer)
        assert answer.status == 431
    answer = exchange(server.listener.port, request("/" + "a" * 70_000))
    assert_refused(answer)
    assert answer.status == 431


FIRST_LINES = [
    b"GET /health", b"GET", b"GET /health HTTP/0.9", b"GET /health HTTP/2.0",
    b"GET /health HTTP/11", b"GET /health HTTP/1.1.1", b"GET /health http/1.1",
    b"GET /health HTTP/1.x", b"GET /health FTP/1.1", b"GET /he alth HTTP/1.1",
    b"GET\xa0/health HTTP/1.1", b"POST /v1/chat/completions", b"\x16\x03\x01\x02\x00",
    b"PRI * HTTP/2.0", b"GET /health HTTP/99999999999.1", b"GET /health HTTP/-1.1",
    b"SSH-2.0-OpenSSH_9", b"GET /health HTTP/1.1 x", b"*1 $4 PING", b"\x00\x00\x00",
]  # fmt: skip


def test_first_lines_of_other_protocols(server: App) -> None:
    """HTTP/0.9, HTTP/2, TLS, SSH, Redis: a status line says no."""
    for line in FIRST_LINES:
        answer = exchange(server.listener.port, line + b"\r\nHost: localhost\r\n\r\n")
        assert_refused(answer)
        assert answer.status == 400, line


def test_random_bytes(server: App) -> None:
    """Noise, with and without line ends."""
    chance = random.Random(3)
    for number in range(120):
        noise = chance.randbytes(chance.randint(1, 400))
        if number % 2:
            noise = noise.replace(b"\n", b"") + b"\r\n\r\n"
        assert_refused(exchange(server.listener.port, noise, end=True))


def test_cut_heads(server: App) -> None:
    """A head that ends anywhere is no request."""
    whole = request(CHAT, b"{}")[:-2]
    for length in range(1, len(whole) - 2, 2):
        answer = exchange(server.listener.port, whole[:length], end=True)
        assert_refused(answer)


def test_strangers(server: App) -> None:
    """Origins and host names of web pages."""
    for origin in ("http://evil.example", "null", "", "http://localhost:3000"):
        data = request("/v1/models", headers=(f"Origin: {origin}",))
        answer = exchange(server.listener.port, data)
        assert_refused(answer)
        assert answer.status == 403
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example",
                 "rebind.it:80", "0x7f000001", "[localhost]x", "a" * 999):  # fmt: skip
        answer = exchange(server.listener.port, request("/v1/models", host=host))
        assert_refused(answer)
        assert answer.status == 403


@pytest.mark.parametrize("sent", ["nothing", "head", "body", "chunk"])
def test_slow_clients_are_dropped(
    server: App, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte now and then does not hold a thread: each part has its deadline."""
    for name in ("_IDLE_S", "_HEAD_S", "_BODY_S"):
        monkeypatch.setattr(connection_module, name, 0.4)
    monkeypatch.setattr(connection_module, "_BODY_GAP_S", 0.3)
    start = {
        "nothing": b"",
        "head": b"GET /health HT",
        "body": request(CHAT, b"x" * 500)[:-450],
        "chunk": request(CHAT, headers=("Transfer-Encoding: chunked",), method="POST"),
    }[sent]
    with connect(server.listener.port) as connection:
        connection.sendall(start)
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                try:
                    connection.sendall(b"" if sent == "nothing" else b"1")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with connection.makefile("rb") as stream:
                answer = read_answer(stream)
        finally:
            ended.set()
            dripping.join()
    assert_refused(answer)
    if sent in ("body", "chunk"):
        assert answer.status in (400, 408)
