"""What happens to a request in mid-answer: disconnect, cancel, time-out, silence."""

import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sidecar.app import App
from testkit.raw_http import (
    Answer,
    connect,
    eventually,
    exchange,
    read_answer,
    request,
)
from testkit.scripted import Prompt, scripted
from testkit.servers import held_gpu, metric, num_left, running_sidecar

ModelFolder = Callable[[str], Path]
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
KEEPALIVE_S = 0.2


def write_call(prompt: Prompt) -> str:
    """A call with as many words as the prompt asks for."""
    count = int(prompt.turns[-1].text)
    arguments = {"text": "one two three " * (count // 3)}
    return "<tool_call>" + json.dumps({"name": "write", "arguments": arguments})


TOOLS = [{"type": "function", "function": {"name": "write"}}]
OTHERS = [{"type": "function", "function": {"name": "other"}}]


@pytest.fixture(scope="module")
def endless(model_folder: ModelFolder) -> Iterator[App]:
    """A model that never ends its turn; prefill in small chunks takes its time."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "PREFILL_STEP_SIZE": "16",
        "KEEPALIVE_SECONDS": str(KEEPALIVE_S),
    }
    with running_sidecar(settings) as app:
        yield app


@pytest.fixture(scope="module")
def impatient(model_folder: ModelFolder) -> Iterator[App]:
    """The same with time limits of one second."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "TIMEOUT_CHAT_SECONDS": "1",
        "TIMEOUT_COMPLETIONS_SECONDS": "1",
    }
    with running_sidecar(settings) as app:
        yield app


@pytest.fixture(scope="module")
def caller(model_folder: ModelFolder) -> Iterator[App]:
    """A model that always writes one long tool call."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "KEEPALIVE_SECONDS": "0.1"}
    with running_sidecar(settings, scripted(write_call)) as app:
        yield app


def body(text: str = "x", **more: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"messages": messages, "max_tokens": 30_000, **more}).encode()


def prompt_of(num_words: int) -> str:
    """About as many tokens."""
    return " ".join(f"w{number % 97}" for number in range(num_words // 3))


def lines_of(app: App, data: bytes) -> Iterator[str]:
    """Lines of a stream, as they come."""
    with httpx.stream(
        "POST", app.url + CHAT, content=data, timeout=120,
        headers={"Content-Type": "application/json"},
    ) as answer:  # fmt: skip
        assert answer.status_code == 200
        yield from filter(None, answer.iter_lines())


def is_decoding(app: App) -> bool:
    served = next(iter(app.pool.loaded()), None)
    return served is not None and bool(served.engine._loop._rows)


def is_prefilling(app: App) -> bool:
    served = next(iter(app.pool.loaded()), None)
    begun = served.engine._loop.prefills.begun if served else []
    return any(prefill.done for prefill in begun)


def is_free(app: App) -> bool:
    """Whether nothing is leased and nothing is computed."""
    served = next(iter(app.pool.loaded()), None)
    assert served is not None
    return app.pool.num_leases == 0 and not served.engine._loop.has_work()


STATES: dict[str, dict[str, Any]] = {
    "decode of a stream": {"stream": True},
    "decode of a whole answer": {"stream": False},
    "prefill of a stream": {"stream": True, "text": prompt_of(20_000)},
    "prefill of a whole answer": {"stream": False, "text": prompt_of(20_000)},
    "decode of several answers": {"stream": False, "n": 4},
}


@pytest.mark.parametrize("state", STATES)
def test_a_client_that_leaves_frees_the_engine(endless: App, state: str) -> None:
    """Closing the connection ends the job, whatever it was doing, and not its end."""
    before, is_there = num_left(endless), is_decoding
    if state.startswith("prefill"):
        is_there = is_prefilling
    with connect(endless.listener.port) as connection:
        connection.sendall(request(CHAT, body(**STATES[state])))
        assert eventually(lambda: is_there(endless))
    assert eventually(lambda: is_free(endless))
    assert num_left(endless) == before + 1
    answer = exchange(endless.listener.port, request(CHAT, body(max_tokens=1)))
    assert answer.status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_a_long_call_frees_the_engine(
    caller: App, stream: bool
) -> None:
    """Before its end; its client may leave all the same."""
    before = num_left(caller)
    with connect(caller.listener.port) as connection:
        connection.sendall(request(CHAT, body("4500", tools=TOOLS, stream=stream)))
        assert eventually(lambda: is_decoding(caller))
    assert eventually(lambda: is_free(caller))
    assert num_left(caller) == before + 1


def test_a_long_call_does_not_look_dead(caller: App) -> None:
    """While one of no offered tool is held back, keep-alives come."""
    lines = list(lines_of(caller, body("300", tools=OTHERS, stream=True)))
    called = [n for n, line in enumerate(lines) if '"tool_calls"' in line]
    assert ": keepalive" in lines[: called[0]]
    assert len(called) == 3  # its head, its arguments, the reason


def test_a_long_call_is_seen_while_it_is_written(caller: App) -> None:
    """Its arguments come in pieces that are JSON together."""
    lines = list(lines_of(caller, body("300", tools=TOOLS, stream=True)))
    chunks = [json.loads(line[6:]) for line in lines if '"tool_calls":' in line]
    pieces = [call["function"].get("arguments", "") for chunk in chunks
              for call in chunk["choices"][0]["delta"]["tool_calls"]]  # fmt: skip
    assert len(pieces) > 100
    assert json.loads("".join(pieces))["text"] == "one two three " * 100


def test_a_slow_prefill_does_not_look_dead(endless: App) -> None:
    """Comments come while the prompt is computed, then the answer as ever."""
    began, comments = time.monotonic(), 0
    with held_gpu(endless) as go:
        for line in lines_of(endless, body(stream=True, max_tokens=2)):
            comments += line == ": keepalive" and not go.is_set()
            if comments == 3:
                go.set()
    assert comments == 3
    assert time.monotonic() - began >= 3 * KEEPALIVE_S, "they come too often"
    assert line == "data: [DONE]"


def test_the_plugin_gets_empty_deltas_for_keep_alive(endless: App) -> None:
    """LiteLLM swallows comments; a chunk that says nothing passes through it."""
    data = body(stream=True, max_tokens=2, x_mlx={})
    lines, chunks, empty = [], [], 0
    with held_gpu(endless) as go:
        for line in lines_of(endless, data):
            lines.append(line)
            if line != "data: [DONE]":
                chunks.append(json.loads(line[6:]))
                choices = chunks[-1]["choices"]
                empty += bool(choices) and choices[0]["delta"] == {}
            if empty == 3:
                go.set()
    assert ": keepalive" not in lines
    assert empty >= 4  # those that came while it waited, and the finish
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" in chunks[-2]


def start(app: App, data: bytes, name: str) -> tuple[threading.Thread, list[Answer]]:
    """
    Send a request on a thread of its own; its answer comes into the list.

    Args:
        name: its id, by which it can be cancelled from now on.
    """
    answers: list[Answer] = []

    def run() -> None:
        with connect(app.listener.port) as connection:
            connection.sendall(data)
            with connection.makefile("rb") as stream:
                answers.append(read_answer(stream))

    thread = threading.Thread(target=run)
    thread.start()
    running = app.listener.routes._services.chat._running
    assert eventually(lambda: any(id == name for _, id in running)), answers
    return thread, answers


def cancel(app: App, name: str) -> Any:
    return exchange(
        app.listener.port, request(f"/v1/cancel/{name}", method="POST")
    ).json


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_cancelling_a_whole_answer(endless: App, path: str) -> None:
    """Its client gets 499, the canceller is told, the engine is free."""
    data = body(prompt="x") if path == COMPLETION else body()
    name = path[1:].replace("/", ".")
    data = request(path, data, (f"X-Request-ID: {name}",))
    waiting, answers = start(endless, data, name)
    assert cancel(endless, name) == {"cancelled": True, "id": name}
    waiting.join(120)
    assert (answers[0].status, answers[0].header("x-request-id")) == (499, name)
    assert answers[0].json["error"]["code"] == "request_cancelled"
    assert eventually(lambda: is_free(endless))
    assert cancel(endless, name) == {"cancelled": False, "id": name}


def test_cancelling_a_stream(endless: App) -> None:
    """The stream ends with an error event, and never with [DONE]."""
    data = request(CHAT, body(stream=True), ("X-Request-ID: stream-1",))
    waiting, answers = start(endless, data, "stream-1")
    assert cancel(endless, "stream-1")["cancelled"]
    waiting.join(120)
    lines = answers[0].body.decode().strip().split("\n\n")
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"] == "request_cancelled"
    assert "[DONE]" not in answers[0].body.decode()


HI = [{"role": "user", "content": "x"}]
ANSWERED = [
    (CHAT, "chatcmpl-", {"messages": HI, "max_tokens": 30_000}),
    (COMPLETION, "cmpl-", {"prompt": "x", "max_tokens": 30_000}),
    ("/v1/messages", "msg_", {"messages": HI, "max_tokens": 30_000}),
    ("/v1/responses", "resp_", {"input": "x", "max_output_tokens": 30_000}),
]


@pytest.mark.parametrize(("path", "prefix", "sent"), ANSWERED)
def test_cancelling_by_the_id_that_the_client_sees(
    endless: App, path: str, prefix: str, sent: Any
) -> None:
    """A stream's first event has it; nobody has to choose an X-Request-ID."""
    data = json.dumps({"model": "local", **sent, "stream": True}).encode()
    with connect(endless.listener.port) as connection:
        # The server closes the connection, so its answer can be read to the end.
        connection.sendall(request(path, data, ("Connection: close",)))
        with connection.makefile("rb") as stream:
            pattern = rf'"id":"({prefix}[0-9a-f]+)"'
            lines = iter(lambda: stream.readline().decode(), "")
            found = (re.search(pattern, line) for line in lines)
            name = next(match[1] for match in found if match)
            is_chat = path != COMPLETION
            assert bool(endless.shared.tombstones._answering) is is_chat
            assert cancel(endless, name) == {"cancelled": True, "id": name}
            assert "cancelled" in stream.read().decode()
            assert not endless.shared.tombstones._answering
    assert cancel(endless, name) == {"cancelled": False, "id": name}


def test_cancelling_in_prefill(endless: App) -> None:
    """A long prompt is given up within a chunk."""
    data = request(CHAT, body(prompt_of(20_000)), ("X-Request-ID: prefill",))
    waiting, answers = start(endless, data, "prefill")
    assert eventually(lambda: is_prefilling(endless))
    with endless.pool.lease("local") as served, held_gpu(endless):
        prefill = served.engine._loop.prefills.current
        done = prefill.done
        assert cancel(endless, "prefill")["cancelled"]
    waiting.join(120)
    assert answers[0].status == 499
    assert eventually(lambda: is_free(endless))
    assert prefill.done == done < prefill.target


def test_a_cancel_may_overtake_its_request(endless: App) -> None:
    """A request whose cancel came first is not begun."""
    assert not cancel(endless, "overtaken")["cancelled"]
    data = request(CHAT, body(), ("X-Request-ID: overtaken",))
    assert exchange(endless.listener.port, data).status == 499


def test_cancelling_what_is_not_there(endless: App) -> None:
    """No error: it may have ended by itself a moment ago."""
    assert cancel(endless, "n%20o") == {"cancelled": False, "id": "n o"}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_whole_answer_that_takes_too_long_is_408(impatient: App, path: str) -> None:
    """After its time limit; the engine is free."""
    started = time.monotonic()
    data = request(path, body(prompt="x"))
    answer = exchange(impatient.listener.port, data)
    assert time.monotonic() - started > 0.9
    assert answer.status == 408
    assert answer.json["error"]["code"] == "request_timeout"
    assert "1 seconds" in answer.json["error"]["message"]
    assert eventually(lambda: is_free(impatient))


def test_a_stream_that_takes_too_long_ends_with_an_error(impatient: App) -> None:
    """What was said stays said; then an error event and no [DONE]."""
    answer = exchange(impatient.listener.port, request(CHAT, body(stream=True)))
    lines = answer.body.decode().strip().split("\n\n")
    assert len(lines) > 2
    assert json.loads(lines[-1][6:])["error"]["code"] == "request_timeout"
    assert "[DONE]" not in answer.body.decode()


def test_a_connection_is_good_after_an_error_in_mid_stream(impatient: App) -> None:
    """Clients take it for kept: their next request on it failed 11 of 25 times."""
    line = connect(impatient.listener.port)
    with line as connection, connection.makefile("rb") as stream:
        connection.sendall(request(CHAT, body(stream=True)))
        assert b"request_timeout" in read_answer(stream).body
        for path in ("/health", "/v1/models"):
            connection.sendall(request(path))
            assert read_answer(stream).status == 200


def test_the_sdk_raises_on_an_error_in_mid_stream(impatient: App) -> None:
    """OpenAI's own client takes the error event for what it is."""
    client = openai.OpenAI(base_url=f"{impatient.url}/v1", api_key="x", max_retries=0)
    stream = client.chat.completions.create(
        model="local",
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        max_tokens=30_000,
    )
    with client, pytest.raises(openai.APIError, match="no answer within 1 seconds"):
        for _ in stream:
            pass


def test_health_and_metrics_answer_while_it_generates(endless: App) -> None:
    """They never wait for the GPU, not even for one long step."""
    with connect(endless.listener.port) as connection:
        connection.sendall(request(CHAT, body()))
        assert eventually(lambda: is_decoding(endless))
        with held_gpu(endless):
            for path in ("/health", "/metrics", "/v1/models"):
                answer = exchange(endless.listener.port, request(path))
                assert answer.status == 200
                if path == "/metrics":
                    assert "\nmlx_active_requests 1.0\n" in answer.body.decode()
    assert eventually(lambda: is_free(endless))


def test_metrics_tell_how_requests_ended(
    impatient: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statuses by endpoint, tokens by kind, jobs by their end, times of all."""
    routes = impatient.listener.routes
    names = {
        'mlx_requests_total{endpoint="/v1/chat/completions",status="200"}': 1,
        'mlx_requests_total{endpoint="other",status="404"}': 1,
        'mlx_jobs_ended_total{reason="finished"}': 1,
        'mlx_jobs_ended_total{reason="timeout"}': 1,
        "mlx_ttft_seconds_count": 2,
        "mlx_inter_token_seconds_count": 2,
        "mlx_pool_cache_hits_total": 2,
        "mlx_active_requests": 0,
    }
    generated = 'mlx_token_throughput_total{kind="generated"}'
    before = {name: metric(impatient, name) for name in (*names, generated)}
    port = impatient.listener.port
    with monkeypatch.context() as patch:
        patient = dataclasses.replace(routes._config, timeout_chat_s=120)
        patch.setattr(routes, "_config", patient)
        assert exchange(port, request(CHAT, body(max_tokens=2))).status == 200
    assert exchange(port, request("/nothing/of/that/name")).status == 404
    assert exchange(port, request(CHAT, body())).status == 408
    for name, more in names.items():
        assert metric(impatient, name) - before[name] == more, name
    # What was generated for the one that took too long counts as well.
    assert metric(impatient, generated) - before[generated] > 2
    assert exchange(port, request("/metrics")).header("content-type") == (
        "text/plain; version=0.0.4; charset=utf-8"
    )
