"""Clients that leave, and sidecars that are slow to say yes."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from testkit.raw_http import connect, request
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar, wait_until
from tests.litellm_mlx.proxy_client import CHAT, ROUTES, body_for, both_modes, post
from tests.litellm_mlx.sidecar_answers import Json, Script, slow_answer, text_answer


def ask_and_leave(proxy: Proxy, sidecar: FakeSidecar, model: str, body: Json) -> None:
    """Close the connection once the sidecar was asked, without having heard a word."""
    port = httpx.URL(proxy.url).port
    assert port is not None
    headers = ("Content-Type: application/json", "Authorization: Bearer any")
    with connect(port) as connection:
        connection.sendall(request(CHAT, json.dumps(body).encode(), headers))
        wait_until(lambda: sidecar.calls_for(model))


class TestDisconnect:
    @pytest.mark.parametrize("route", ROUTES)
    def test_a_client_that_leaves_a_stream(
        self, proxy: Proxy, sidecar: FakeSidecar, route: str
    ) -> None:
        """The sidecar gets a cancel for the very id, and its socket is closed."""
        model = sidecar.on(f"leave{route[3:6]}", Script(steps=slow_answer("x")))
        body = body_for(route, f"mlx/{model}", stream=True)
        with proxy.http.stream("POST", route, json=body) as answer:
            lines = answer.iter_lines()
            while "word" not in next(lines):
                pass
        wait_until(lambda: sidecar.is_cancelled(model))
        wait_until(lambda: sidecar.last_call(model).gone_at)

    @both_modes
    def test_a_client_that_leaves_before_the_first_word(
        self, proxy: Proxy, sidecar: FakeSidecar, stream: bool
    ) -> None:
        """During a long prefill the sidecar would not notice by itself."""
        gate = threading.Event()
        steps = [30.0, *text_answer("x", "late")]
        script = Script(steps=steps, gate=None if stream else gate)
        model = sidecar.on(f"impatient-{stream}", script)
        body = body_for(CHAT, f"mlx/{model}", stream=stream)
        ask_and_leave(proxy, sidecar, model, body)
        wait_until(lambda: sidecar.is_cancelled(model))
        gate.set()

    @pytest.mark.parametrize("wait_s", [0.8, 2.8], ids=["within", "beyond"])
    def test_a_client_that_leaves_during_the_eager_wait(
        self, proxy: Proxy, sidecar: FakeSidecar, wait_s: float
    ) -> None:
        """The thread that waits has nobody to hand the stream to."""
        script = Script(steps=slow_answer("x"), wait_s=wait_s)
        model = sidecar.on(f"eager-leave-{wait_s}", script)
        body = body_for(CHAT, f"mlx/{model}", stream=True)
        ask_and_leave(proxy, sidecar, model, body)
        wait_until(lambda: sidecar.is_cancelled(model))

    @both_modes
    def test_a_sidecar_that_falls_silent(
        self, proxy: Proxy, sidecar: FakeSidecar, stream: bool
    ) -> None:
        """The client's time limit holds, and nobody works on for nothing."""
        gate = threading.Event()
        script = Script(steps=text_answer("x", "late"), gate=gate)
        model = sidecar.on(f"silent-{stream}", script)
        body = {**body_for(CHAT, f"mlx/{model}", stream=stream), "timeout": 1.0}
        answer = proxy.http.post(CHAT, json=body)
        assert answer.status_code == 408
        assert "sidecar fell silent" in answer.text
        wait_until(lambda: sidecar.is_cancelled(model))
        gate.set()

    @both_modes
    def test_a_finished_call_is_not_cancelled(
        self, proxy: Proxy, sidecar: FakeSidecar, stream: bool
    ) -> None:
        """Neither after a stream nor after a whole answer."""
        model = f"finished-{stream}"
        assert post(proxy, CHAT, f"mlx/{model}", stream=stream).status_code == 200
        # By the time another call was cancelled, this one would have been.
        later = sidecar.on(f"{model}-later", Script(steps=slow_answer("x")))
        ask_and_leave(
            proxy, sidecar, later, body_for(CHAT, f"mlx/{later}", stream=True)
        )
        wait_until(lambda: sidecar.is_cancelled(later))
        assert not sidecar.is_cancelled(model)


def test_slow_opens_do_not_stall_a_bystander(
    proxy: Proxy, sidecar: FakeSidecar
) -> None:
    """14 calls wait for their headers; others must not wait for a thread."""
    gate = threading.Event()
    slow = sidecar.on("slow-open", Script(steps=text_answer("x", "done"), gate=gate))

    def ask(_number: int) -> str:
        with httpx.Client(base_url=proxy.url, timeout=240, trust_env=False) as client:
            body = body_for(CHAT, f"mlx/{slow}", stream=True)
            return client.post(CHAT, json=body).text

    with ThreadPoolExecutor(14) as threads:
        asked = [threads.submit(ask, number) for number in range(14)]
        try:
            wait_until(lambda: len(sidecar.calls_for(slow)) >= 8)
            for _ in range(5):
                answer = post(proxy, CHAT, "mlx/bystander", stream=True)
                assert answer.status_code == 200
            assert not any(call.done() for call in asked)
        finally:
            gate.set()
        answers = [call.result() for call in asked]
    assert all('"done"' in answer and "[DONE]" in answer for answer in answers)
