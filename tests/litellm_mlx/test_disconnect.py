"""Clients that leave, and sidecars that are slow to say yes."""

import threading
import time

import httpx
import pytest
from conftest import Proxy
from fake_sidecar import FakeSidecar, wait_until
from proxy_client import CHAT, ROUTES, body_for, both_modes, post
from sidecar_answers import Script, slow_answer, text_answer


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
        wait_until(lambda: sidecar.is_cancelled(model), 2)
        wait_until(lambda: sidecar.last_call(model).gone_at, 2)

    @both_modes
    def test_a_client_that_leaves_before_the_first_word(
        self, proxy: Proxy, sidecar: FakeSidecar, stream: bool
    ) -> None:
        """During a long prefill the sidecar would not notice by itself."""
        steps = [2.5, *text_answer("x", "late")]
        script = Script(steps=steps, wait_s=0.0 if stream else 2.5)
        model = sidecar.on(f"impatient-{stream}", script)
        body = body_for(CHAT, f"mlx/{model}", stream=stream)
        with pytest.raises(httpx.ReadTimeout):
            proxy.http.post(CHAT, json=body, timeout=0.3)
        wait_until(lambda: sidecar.is_cancelled(model), 2)

    @pytest.mark.parametrize("wait_s", [0.8, 2.8], ids=["within", "beyond"])
    def test_a_client_that_leaves_during_the_eager_wait(
        self, proxy: Proxy, sidecar: FakeSidecar, wait_s: float
    ) -> None:
        """The thread that waits has nobody to hand the stream to."""
        script = Script(steps=slow_answer("x"), wait_s=wait_s)
        model = sidecar.on(f"eager-leave-{wait_s}", script)
        body = body_for(CHAT, f"mlx/{model}", stream=True)
        with pytest.raises(httpx.ReadTimeout):
            proxy.http.post(CHAT, json=body, timeout=0.3)
        wait_until(lambda: sidecar.is_cancelled(model), 4)

    @both_modes
    def test_a_sidecar_that_falls_silent(
        self, proxy: Proxy, sidecar: FakeSidecar, stream: bool
    ) -> None:
        """The client's time limit holds, and nobody works on for nothing."""
        script = Script(steps=text_answer("x", "late"), wait_s=1.5)
        model = sidecar.on(f"silent-{stream}", script)
        body = {**body_for(CHAT, f"mlx/{model}", stream=stream), "timeout": 0.4}
        answer = proxy.http.post(CHAT, json=body)
        assert answer.status_code == 408
        assert "sidecar fell silent" in answer.text
        wait_until(lambda: sidecar.is_cancelled(model), 1)

    @both_modes
    def test_a_finished_call_is_not_cancelled(
        self, proxy: Proxy, sidecar: FakeSidecar, stream: bool
    ) -> None:
        """Neither after a stream nor after a whole answer."""
        model = f"finished-{stream}"
        assert post(proxy, CHAT, f"mlx/{model}", stream=stream).status_code == 200
        time.sleep(0.2)
        assert not sidecar.is_cancelled(model)


def test_slow_opens_do_not_stall_a_bystander(
    proxy: Proxy, sidecar: FakeSidecar
) -> None:
    """14 calls wait 3 s for their headers; others must not wait for a thread."""
    slow = sidecar.on("slow-open", Script(steps=text_answer("x", "done"), wait_s=3.0))
    answers: list[str] = []

    def ask() -> None:
        with httpx.Client(base_url=proxy.url, timeout=30, trust_env=False) as client:
            body = body_for(CHAT, f"mlx/{slow}", stream=True)
            answers.append(client.post(CHAT, json=body).text)

    threads = [threading.Thread(target=ask) for _ in range(14)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    wait_until(lambda: len(sidecar.calls_for(slow)) >= 8)
    took = []
    for _ in range(5):
        asked = time.monotonic()
        assert post(proxy, CHAT, "mlx/bystander", stream=True).status_code == 200
        took.append(time.monotonic() - asked)
    for thread in threads:
        thread.join()
    assert max(took) < 1.0
    assert len(answers) == 14
    assert all('"done"' in answer and "[DONE]" in answer for answer in answers)
    assert time.monotonic() - started < 6.0
