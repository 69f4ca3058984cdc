"""What is told of a request that was not read to its end."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.raw_http import eventually
from testkit.servers import running_sidecar

LOGGER = "sidecar.service.turn"


@pytest.fixture
def endless(model_folder: Callable[[str], Path]) -> Iterator[App]:
    """A model that never ends its turn."""
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        yield app


def told(caplog: pytest.LogCaptureFixture) -> str:
    """The line at the request's end, once it is there."""

    def lines() -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        return [line for line in said if line.startswith("request ended")]

    assert eventually(lambda: bool(lines()), 30)
    (line,) = lines()
    return line


def test_who_leaves_in_mid_answer_had_so_many_tokens(
    endless: App, caplog: pytest.LogCaptureFixture
) -> None:
    """Those sampled until then, not none; and a time to the first that was measured."""
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    url = f"{endless.url}/v1/chat/completions"
    with caplog.at_level(logging.INFO, LOGGER):
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
        line = told(caplog)
    assert "outcome=client_gone" in line
    output = re.search(r"output=(\d+)", line)
    assert output is not None
    assert int(output[1]) >= 5
    assert re.search(r"ttft_s=\d+\.\d{3} ", line)


def test_who_was_cancelled_before_the_first_token_has_no_time_to_it(
    endless: App, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancel that overtook its request: nothing was sampled, nothing is made up."""
    httpx.post(f"{endless.url}/v1/cancel/gone", timeout=60)
    body = {"messages": [{"role": "user", "content": "x"}]}
    with caplog.at_level(logging.INFO, LOGGER):
        answer = httpx.post(
            f"{endless.url}/v1/chat/completions",
            json=body,
            headers={"X-Request-ID": "gone"},
            timeout=60,
        )
        line = told(caplog)
    assert answer.status_code == 499
    assert "ttft_s=- " in line
    assert "output=0 " in line
    assert "tps=0.0" in line


def test_a_request_that_was_broken_off_is_gone_on_with_when_its_clock_has_moved(
    endless: App, caplog: pytest.LogCaptureFixture
) -> None:
    """What was computed of the prompt is reused: the clock is said anew."""

    def asked(clock: str, **options: Any) -> dict[str, Any]:
        about = f"Current time is {clock}.\n{'Be brief and kind. ' * 200}"
        messages = [
            {"role": "system", "content": about},
            {"role": "user", "content": "x"},
        ]
        return {"messages": messages, "session_id": "one", **options}

    url = f"{endless.url}/v1/chat/completions"
    with caplog.at_level(logging.INFO, LOGGER):
        first = asked("10:05", stream=True)
        with endless.pool.lease("local") as served:
            loop, store = served.engine._loop, served.engine.store
        with httpx.stream("POST", url, json=first, timeout=60):
            # Not its first line: that comes before the prompt is computed.
            assert eventually(lambda: bool(loop._rows), 60)
        told(caplog)
    assert eventually(lambda: store.num_bytes > 0, 30)
    usage = httpx.post(url, json=asked("10:06", max_tokens=1), timeout=60).json()[
        "usage"
    ]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * usage["prompt_tokens"]
