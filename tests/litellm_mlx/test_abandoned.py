"""
Answers that nobody waits for any more: no socket, no file and no connection stays.

How many: 60 of each kind here, 2,000 of each with `-m slow`; the proxy may have 256
files open, which is what macOS gives.
"""

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from litellm_mlx import client
from litellm_mlx.streams import AsyncChunks
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar, wait_until
from tests.litellm_mlx.provider_calls import call_with
from tests.litellm_mlx.proxy_client import (
    CHAT,
    MESSAGES,
    RESPONSES,
    ROUTES,
    body_for,
    post,
)
from tests.litellm_mlx.sidecar_answers import Script, Step, slow_answer
from tests.support.raw_http import connect, request

MOST_FILES = 256
NUM_CLIENTS = 6  # at once: more than the streams that may be opened early
# Streamed and left after two words, streamed and left before the first, whole.
KINDS = ("words", "silence", "whole")
# 20 s: LiteLLM reads some answers to their ends for clients of /v1/responses that left.
NUM_WORDS = 400


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


def abandon(
    proxy: Proxy, sidecar: FakeSidecar, route: str, kind: str, name: str
) -> None:
    """Ask on a connection of its own and close it, as a client that is stopped."""
    gate = None if kind == "words" else threading.Event()
    sidecar.on(name, Script(steps=STEPS[route], gate=gate))
    port = httpx.URL(proxy.url).port
    assert port is not None
    body = json.dumps(body_for(route, f"native/{name}", stream=kind != "whole"))
    headers = ("Content-Type: application/json", "Authorization: Bearer any")
    with connect(port) as connection:
        connection.sendall(request(route, body.encode(), headers))
        if gate:
            wait_until(lambda: sidecar.calls_for(name))
        else:
            read_two_words(connection)
    if gate:
        gate.set()  # what is sent now, nobody reads


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
    process.rlimit(resource.RLIMIT_NOFILE, (MOST_FILES, usual[1]))
    yield process
    process.rlimit(resource.RLIMIT_NOFILE, usual)


def sockets(process: psutil.Process, sidecar: FakeSidecar) -> list[str]:
    """States of the process's connections to the sidecar."""
    port = httpx.URL(sidecar.root).port
    connections = process.net_connections()
    return [c.status for c in connections if c.raddr != () and c.raddr.port == port]


def check_nothing_stays(
    proxy: Proxy,
    sidecar: FakeSidecar,
    few_files: psutil.Process,
    route: str,
    num_aborts: int,
) -> None:
    for kind in KINDS:

        def leave(number: int, kind: str = kind) -> None:
            name = f"left-{route[4:]}-{kind}-{num_aborts}-{number}"
            abandon(proxy, sidecar, route, kind, name)

        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            list(threads.map(leave, range(num_aborts)))
        # Of its own requests LiteLLM keeps some connections for the next.
        most = 0 if route == CHAT else NUM_CLIENTS
        wait_until(lambda most=most: len(sockets(few_files, sidecar)) <= most)  # type: ignore[misc]
    assert post(proxy, CHAT, "native/after", stream=False).status_code == 200


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="needs prlimit")
@pytest.mark.parametrize("route", ROUTES)
class TestProxy:
    @pytest.mark.slow  # minutes; the plugin's own half is tested below on each run
    @pytest.mark.timeout(1800)
    def test_sixty_clients_that_leave(
        self, proxy: Proxy, sidecar: FakeSidecar, few_files: psutil.Process, route: str
    ) -> None:
        """At three moments each."""
        check_nothing_stays(proxy, sidecar, few_files, route, 60)

    @pytest.mark.slow
    @pytest.mark.timeout(7200)
    def test_two_thousand_clients_that_leave(
        self, proxy: Proxy, sidecar: FakeSidecar, few_files: psutil.Process, route: str
    ) -> None:
        """Eight times as many as there may be files, of each kind."""
        check_nothing_stays(proxy, sidecar, few_files, route, 2000)


class TestPlugin:
    @pytest.mark.parametrize("num_words", [0, 2])
    def test_a_reader_that_is_cancelled_again_and_again(
        self, sidecar: FakeSidecar, num_words: int
    ) -> None:
        """As LiteLLM's server does it; neither socket nor entry of the pool stays."""
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
    pool = client._async_client()._transport._pool  # type: ignore[attr-defined]
    async with asyncio.timeout(120):
        while pool.connections:
            await asyncio.sleep(0.01)
