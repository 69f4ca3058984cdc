"""A batch gives way to whoever waits for an answer, and costs no warm conversation."""

import statistics
import time
from pathlib import Path

import httpx
import pytest

from testkit.servers import running_sidecar
from tests.batches.conftest import (
    Batches,
    begun,
    chat_line,
    ended,
    read,
    waited,
    written,
)

_TALK = [{"role": "user", "content": "Tell me a story. " * 60}]


def _ttft_s(url: str, messages: list[dict[str, str]]) -> float:
    body = {"model": "local", "messages": messages, "max_tokens": 2, "stream": True,
            "temperature": 0}  # fmt: skip
    started = time.perf_counter()
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:") and '"content":""' not in line:
                return time.perf_counter() - started
    raise AssertionError("no text")


def test_nothing_of_a_batch_runs_beside_a_request(batches: Batches) -> None:
    client, url = batches.client(), batches.app.url
    lines = [chat_line(f"line-{n}", f"Say {n}.", max_tokens=200) for n in range(30)]
    batch = begun(client, written(lines))
    waited(
        lambda: batches.app.shared.admission.num_open, lambda number: number > 0
    )  # fmt: skip
    body = {"model": "local", "messages": _TALK, "max_tokens": 40, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                assert batches.app.shared.admission.num_open <= 1
    done = ended(client, batch.id)
    found = read(client.files.content(done.output_file_id).read())
    assert done.status == "completed"
    assert len(found) == 30
    assert {one["response"]["status_code"] for one in found.values()} == {200}


@pytest.mark.slow
def test_the_first_token_comes_as_when_idle(batches: Batches) -> None:
    client, url = batches.client(), batches.app.url
    talks = [
        [{"role": "user", "content": f"{n}: {'a word ' * 200}"}] for n in range(60)
    ]
    _ttft_s(url, talks.pop())
    idle = [_ttft_s(url, talks.pop()) for _ in range(12)]
    lines = [chat_line(f"line-{n}", f"Say {n}.", max_tokens=100) for n in range(2000)]
    batch = begun(client, written(lines))
    beside = []
    for _ in range(12):
        waited(lambda: batches.app.shared.admission.num_open, lambda n: n > 0)
        beside.append(_ttft_s(url, talks.pop()))
    client.batches.cancel(batch.id)
    ratio = statistics.median(beside) / statistics.median(idle)
    before, after = (1000 * statistics.median(side) for side in (idle, beside))
    print(f"first token: {before:.1f} ms idle, {after:.1f} beside a batch, {ratio:.2f}")
    assert ratio <= 1.2


def test_a_batch_costs_no_conversation_its_kv(model: Path, tmp_path: Path) -> None:
    settings = {
        "MODEL_PATH": str(model),
        "BATCH_DIR": str(tmp_path / "batches"),
        "PROMPT_CACHE_MAX_ENTRIES_GLOBAL": "3",
    }
    with running_sidecar(settings) as app:
        batches = Batches(app, tmp_path / "batches")
        body = {"model": "local", "messages": _TALK, "max_tokens": 2, "temperature": 0}
        ask = lambda: httpx.post(  # noqa: E731
            f"{app.url}/v1/chat/completions", json=body, timeout=120
        ).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert ask() == 0
        warm = ask()
        assert warm > 0
        client = batches.client()
        lines = [chat_line(f"line-{n}", f"{n} words " * 30) for n in range(12)]
        done = ended(client, begun(client, written(lines)).id)
        assert done.request_counts.completed == 12
        assert ask() == warm
