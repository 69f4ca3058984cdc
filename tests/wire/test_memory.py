"""MAX_PROCESS_MEMORY: too much is refused in words, the next small one is served."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from testkit.process import SidecarProcess, sidecar_process

ModelFolder = Callable[[str], Path]
NUM_REQUESTS = 50
LIMIT_MB = 12


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def tight(
    request: pytest.FixtureRequest,
    model_folder: ModelFolder,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SidecarProcess]:
    settings = {
        "MODEL_PATH": str(model_folder(request.param)),
        "MAX_PROCESS_MEMORY": f"{LIMIT_MB}MB",
        "PREFILL_STEP_SIZE": "256",
    }
    with sidecar_process(tmp_path_factory.mktemp("tight"), settings) as running:
        yield running


def ask(server: SidecarProcess, num_words: int, seed: int) -> httpx.Response:
    text = " ".join(f"w{(n * 7 + seed) % 997}" for n in range(num_words))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def check_refusal(answer: httpx.Response) -> None:
    """It names what is needed, what there is, and what would fit."""
    assert answer.status_code in (400, 503)
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] in ("insufficient_memory", "memory_pressure")
    assert "needs" in error["message"]
    assert f"of {LIMIT_MB} MiB" in error["message"]
    assert re.search(r"largest context that fits now is \d+", error["message"])


@pytest.mark.parametrize("tight", ["dense"], indirect=True)
def test_growing_requests(tight: SidecarProcess) -> None:
    """None ends the process; a refusal is for its own request only."""
    statuses = []
    for number in range(NUM_REQUESTS):
        answer = ask(tight, 70 * (number + 1), number)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            check_refusal(answer)
            small = ask(tight, 10, number)
            assert small.status_code == 200, small.text
    assert tight.process.poll() is None
    assert statuses[0] == 200
    assert set(statuses) != {200}, "nothing was too large: this shows nothing"
    assert statuses.count(200) > 5
    first_refused = next(i for i, status in enumerate(statuses) if status != 200)
    assert 200 not in statuses[first_refused + 3 :], "refusals follow no limit"


def test_one_conversation_that_grows(tight: SidecarProcess) -> None:
    """Its own stored KV counts once, and gives way to others."""
    messages: list[dict[str, str]] = []
    statuses = []
    for number in range(NUM_REQUESTS):
        text = " ".join(f"w{(n * 5 + number) % 997}" for n in range(100))
        messages += [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": 4}
        url = f"{tight.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=120)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            check_refusal(answer)
        messages += [{"role": "assistant", "content": "ok"}]
    assert tight.process.poll() is None
    assert statuses[:5] == [200] * 5
    assert set(statuses) != {200}
    assert ask(tight, 10, 1).status_code == 200


def test_what_fits_is_told_live(tight: SidecarProcess) -> None:
    """`/v1/models` and the probe say the largest context that fits now."""
    listed = httpx.get(f"{tight.url}/v1/models").json()["data"][0]
    maximum = listed["max_input_tokens"]
    assert 500 < maximum < 262144
    body = {"messages": [{"role": "user", "content": "w " * 2 * maximum}]}
    probe = httpx.post(f"{tight.url}/v1/cache/probe", json=body, timeout=60).json()
    assert probe["fits"] is False
    assert probe["max_context_tokens"] == pytest.approx(maximum, rel=0.2)


def test_the_limit_was_kept(tight: SidecarProcess) -> None:
    """MLX's own count never went far over it (what else is in RAM is not counted)."""
    metrics = httpx.get(f"{tight.url}/metrics").text
    found = re.search(r"^mlx_peak_memory_bytes (\S+)$", metrics, re.MULTILINE)
    assert found, metrics
    assert float(found[1]) < 1.1 * (LIMIT_MB << 20)
    assert psutil.Process(tight.process.pid).is_running()
