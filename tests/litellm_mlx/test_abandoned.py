"""
Answers that nobody waits for any more: the sidecar is told, and no socket, no file, no
thread and no connection stays.

How many: 24 of each kind here, 2,000 of each with `-m slow`; the proxy may have 256
files open, which is what macOS gives.
"""

import asyncio
import contextlib
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from litellm_mlx import client
from litellm_mlx.streams import AsyncChunks
from testkit.raw_http import connect, exchange, request
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar, wait_until
from tests.litellm_mlx.provider_calls import call_with
from tests.litellm_mlx.proxy_client import (
    CHAT,
    MESSAGES,
    RESPONSES,
    ROUTES,
    body_for,
)
from tests.litellm_mlx.sidecar_answers import Json, Script, Step, slow_answer

MAX_FILES = 256
NUM_CLIENTS = 6  # at once: more than the streams that may be opened early
# Streamed and left after two words, streamed and left before the first, whole; whole
# and left about when the answer comes.
KINDS = ("words", "silence", "whole", "late")
LATE_S = 0.02
NUM_WORDS = 2400  # two minutes: no answer ends by itself in time
# LiteLLM starts threads for its log as they are needed, and keeps them.
MAX_NEW_THREADS = 40


def event(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def long_message() -> list[Step]:
    usage = {"input_tokens": 1, "output_tokens": 0}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m",
               "content": [], "stop_reason": None, "usage": usage}  # fmt: skip
    block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": "word "}
    steps: list[Step] = [event("message_start", message=message)]
    steps += [event("content_block_start", index=0, content_block=block)]
    return [
        *steps,
        *[event("content_block_delta", index=0, delta=delta), 0.05] * NUM_WORDS,
    ]


def long_response() -> list[Step]:
    response = {"id": "resp_1", "object": "response", "created_at": 1, "output": [],
                "status": "in_progress", "model": "m", "parallel_tool_calls": True,
                "tool_choice": "auto", "tools": []}  # fmt: skip
    steps: list[Step] = [
        event("response.created", sequence_number=0, response=response)
    ]
    place = {"item_id": "x", "output_index": 0, "content_index": 0}
    for number in range(1, NUM_WORDS):
        name = "response.output_text.delta"
        steps += [event(name, sequence_number=number, delta="word ", **place), 0.05]
    return steps


STEPS = {
    CHAT: slow_answer("x", NUM_WORDS),
    MESSAGES: long_message(),
    RESPONSES: long_response(),
}
WHOLE: dict[str, Json | None] = {
    CHAT: None,
    MESSAGES: {
        "id": "m", "type": "message", "role": "assistant", "model": "m",
        "content": [{"type": "text", "text": "word"}], "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    RESPONSES: {
        "id": "resp_1", "object": "response", "created_at": 1, "status": "completed",
        "model": "m", "output": [], "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    },
}  # fmt: skip


def script_for(route: str, kind: str) -> Script:
    gate = threading.Event() if kind in ("silence", "whole") else None
    wait_s = LATE_S if kind == "late" else 0.0
    script = Script(steps=STEPS[route], gate=gate, wait_s=wait_s, body=WHOLE[route])
    script.is_cancelled_by_id = True
    return script


def asking(route: str, kind: str, text: str) -> bytes:
    stream = kind in ("words", "silence")
    body = json.dumps(body_for(route, f"left-{kind}", stream=stream))
    headers = ("Content-Type: application/json", "Authorization: Bearer any")
    return request(route, body.replace('"hi"', f'"{text}"').encode(), headers)


def port_of(url: str) -> int:
    port = httpx.URL(url).port
    assert port is not None
    return port


def abandon(
    proxy: Proxy, sidecar: FakeSidecar, route: str, kind: str, text: str
) -> None:
    """Ask on a connection of its own and close it, as a client that is stopped."""
    with connect(port_of(proxy.url)) as connection:
        connection.sendall(asking(route, kind, text))
        if kind == "words":
            read_two_words(connection)
        else:
            wait_asked(proxy, sidecar, connection, text)
        if kind == "late":
            time.sleep(LATE_S)


def wait_asked(
    proxy: Proxy, sidecar: FakeSidecar, connection: socket.socket, text: str
) -> None:
    """Until the sidecar is asked; else tell what the proxy said instead."""

    def is_answered() -> bool:
        return bool(select.select([connection], [], [], 0)[0])

    with contextlib.suppress(AssertionError):
        wait_until(lambda: sidecar.is_asked(text) or is_answered())
    if not sidecar.is_asked(text):
        answer = connection.recv(1 << 16) if is_answered() else b"no answer"
        pytest.fail(f"{text} {answer!r}\n{proxy.log.read_text()[-4000:]}")


def read_two_words(connection: socket.socket) -> None:
    heard = b""
    while heard.count(b"word ") < 2:
        more = connection.recv(1 << 16)
        assert more, heard
        heard += more


@pytest.fixture
def few_files(proxy: Proxy) -> Iterator[psutil.Process]:
    """The proxy's process, which can not have more than 256 files open meanwhile."""
    process = psutil.Process(proxy.pid)
    usual = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (MAX_FILES, usual[1]))
    yield process
    process.rlimit(resource.RLIMIT_NOFILE, usual)


def num_sockets(process: psutil.Process, sidecar: FakeSidecar) -> int:
    """The process's connections to the sidecar."""
    port = port_of(sidecar.root)
    connections = process.net_connections()
    return sum(c.raddr != () and c.raddr.port == port for c in connections)


def check_nothing_stays(
    proxy: Proxy,
    sidecar: FakeSidecar,
    process: psutil.Process,
    route: str,
    num_aborts: int,
) -> None:
    # Of its own requests LiteLLM keeps some connections for the next.
    maximum = 0 if route == CHAT else NUM_CLIENTS
    before = num_sockets(process, sidecar)
    files, threads = process.num_fds(), process.num_threads()
    own_threads = threading.active_count()
    for kind in KINDS:
        model = sidecar.on(f"left-{kind}", script_for(route, kind))
        sidecar.calls.clear()  # of the kind before, or of another route

        def leave(number: int, kind: str = kind) -> None:
            abandon(proxy, sidecar, route, kind, f"{kind}, number {number}.")

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            list(clients.map(leave, range(num_aborts)))
        assert len(sidecar.calls_for(model)) == num_aborts  # none was asked again
        if kind != "late":  # an answer that came in time needs no cancel
            wait_until(lambda model=model: sidecar.is_cancelled(model))  # type: ignore[misc]
        wait_until(lambda: num_sockets(process, sidecar) <= before + maximum)
    wait_until(lambda: process.num_fds() <= files + maximum)
    wait_until(lambda: threading.active_count() <= own_threads + maximum)
    assert process.num_threads() <= threads + MAX_NEW_THREADS
    after = exchange(port_of(proxy.url), asking(route, "late", "after all"))
    assert after.status == 200


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="needs prlimit")
@pytest.mark.parametrize("route", ROUTES)
class TestProxy:
    def test_clients_that_leave(
        self, proxy: Proxy, sidecar: FakeSidecar, few_files: psutil.Process, route: str
    ) -> None:
        """24 at four moments each."""
        check_nothing_stays(proxy, sidecar, few_files, route, 24)

    @pytest.mark.slow
    @pytest.mark.timeout(7200)
    def test_two_thousand_clients_that_leave(
        self, proxy: Proxy, sidecar: FakeSidecar, few_files: psutil.Process, route: str
    ) -> None:
        """Eight times as many as there may be files, at four moments each."""
        check_nothing_stays(proxy, sidecar, few_files, route, 2000)


class TestPlugin:
    @pytest.mark.parametrize("num_words", [0, 2])
    def test_a_reader_that_is_cancelled_again_and_again(
        self, sidecar: FakeSidecar, num_words: int
    ) -> None:
        """As LiteLLM's server does it; no socket stays."""
        name, gate = f"again-{num_words}", threading.Event()
        script = Script(steps=slow_answer("x", NUM_WORDS), gate=gate)
        sidecar.on(name, script)
        if num_words:
            gate.set()
        call = call_with(
            {}, {"api_base": sidecar.base}, model=name, api_base=sidecar.base
        )
        asyncio.run(read_and_cancel(AsyncChunks(call), num_words, sidecar, name))
        gate.set()
        wait_until(lambda: sidecar.is_cancelled(name))
        if num_words:
            wait_until(lambda: sidecar.last_call(name).gone_at)

    def test_a_cancel_at_each_step_of_an_answer_that_has_come(
        self, sidecar: FakeSidecar
    ) -> None:
        """Where it met httpcore's clean-up, the connection stayed open for good."""
        asyncio.run(cancel_at_each_step(sidecar))


async def cancel_at_each_step(sidecar: FakeSidecar) -> None:
    is_read, num_steps = False, 0
    while not is_read:  # else there is a later step to be cancelled at
        name, gate = f"step-{num_steps}", threading.Event()
        sidecar.on(name, Script(gate=gate))
        call = call_with(api_base=sidecar.base, model=name, stream=False)
        asking = asyncio.ensure_future(client.send(call))
        while not sidecar.calls_for(name):
            await asyncio.sleep(0.01)
        gate.set()
        # Without the loop: it comes to the answer in the steps that are counted.
        wait_until(lambda name=name: sidecar.last_call(name).answered_at)  # type: ignore[misc]
        for _ in range(num_steps):
            await asyncio.sleep(0)
        is_read = asking.done()
        asking.cancel()
        await asyncio.wait((asking,))
        num_steps += 1
    await no_sockets(sidecar)


async def no_sockets(sidecar: FakeSidecar) -> None:
    async with asyncio.timeout(120):
        while num_sockets(psutil.Process(), sidecar):
            await asyncio.sleep(0.01)


async def read_and_cancel(
    chunks: AsyncChunks, num_words: int, sidecar: FakeSidecar, name: str
) -> None:
    heard = asyncio.Event()

    async def read() -> None:
        for _ in range(num_words):
            await anext(chunks)
        heard.set()
        async for _chunk in chunks:
            pass

    reader = asyncio.ensure_future(read())
    await heard.wait()
    while not sidecar.calls_for(name):
        await asyncio.sleep(0.01)
    while not reader.done():
        reader.cancel()
        await asyncio.sleep(0)
    await no_sockets(sidecar)
