"""`include_metrics: true`: what a request took, beside its usage."""

import json
import time
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.config.settings import GenerationConfig
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import SamplingParams
from sidecar.engine.job import Job, JobSpec, Prefilled, Token
from sidecar.engine.sampling import settle
from tests.native.conftest import Ask, Json

TALK = [{"role": "user", "content": "Tell me of many things. " * 40}]
BODY: Json = {"model": "hybrid", "max_tokens": 12, "temperature": 0}


def checked(usage: Json) -> Json:
    """Metrics that agree with the usage and with themselves."""
    found: Json = usage["x_metrics"]
    assert found["prompt_tokens"] == usage["prompt_tokens"]
    assert found["generated_tokens"] == usage["completion_tokens"]
    assert found["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < found["prefill_s"] + found["decode_s"] <= found["total_s"] + 1e-3
    num_new = found["prompt_tokens"] - found["cached_tokens"]
    assert found["prefill_tps"] * found["prefill_s"] == pytest.approx(num_new, 0.1)
    num_later = found["generated_tokens"] - 1
    assert found["decode_tps"] * found["decode_s"] == pytest.approx(num_later, 0.1)
    assert 0 < found["active_bytes"] <= found["peak_bytes"]
    return found


def test_a_chat_tells_what_was_computed(ask: Ask) -> None:
    """Of a warm one that is less: what was cached counts in no rate."""
    body = {**BODY, "messages": TALK, "include_metrics": True}
    cold = checked(ask("/v1/chat/completions", **body)[1]["usage"])
    warm = checked(ask("/v1/chat/completions", **body)[1]["usage"])
    assert warm["cached_tokens"] > cold["cached_tokens"]


def test_a_stream_tells_it_with_its_usage(native_app: App) -> None:
    body = {**BODY, "messages": TALK, "include_metrics": True, "stream": True}
    url = f"{native_app.url}/v1/chat/completions"
    lines = httpx.post(url, json=body, timeout=60).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    checked(usage)


@pytest.mark.parametrize("stream", [False, True])
def test_a_raw_completion_tells_it_too(native_app: App, stream: bool) -> None:
    body = {**BODY, "prompt": "Once upon", "include_metrics": True, "stream": stream}
    answer = httpx.post(f"{native_app.url}/v1/completions", json=body, timeout=60)
    if not stream:
        checked(answer.json()["usage"])
        return
    lines = answer.text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    checked(usage)


def test_who_does_not_ask_is_not_told(ask: Ask) -> None:
    usage = ask("/v1/chat/completions", messages=TALK, **BODY)[1]["usage"]
    assert "x_metrics" not in usage


def test_several_prompts_have_no_time_of_their_own(ask: Ask) -> None:
    prompts: list[Any] = ["a", "b"]
    status, body = ask("/v1/completions", prompt=prompts, include_metrics=True, **BODY)
    assert (status, body["error"]["param"]) == (400, "include_metrics")


def test_a_reader_that_comes_late_moves_no_time() -> None:
    """What a prompt waited is told by who computes it, not by who reads of it."""
    greedy = settle(SamplingParams(temperature=0.0), GenerationConfig(), {})
    job = Job(JobSpec(ModelPrompt(ModelIds((1, 2))), greedy, 4))
    job.emit(Prefilled(1, 2, 0))
    began = job.began_at
    assert began is not None
    job.emit(Token(0, "a", None))
    time.sleep(0.01)
    assert isinstance(job.next_event(1), Prefilled)
    assert job.began_at == began < time.monotonic() - 0.009
