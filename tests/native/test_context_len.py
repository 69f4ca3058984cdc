"""`context_len`: a context that forgets its middle, and says so, on every route."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.config.settings import load_config
from sidecar.config.sources import ConfigError
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model
from tests.native.conftest import Ask, Json

WORDS = "Tell me of many things that are far away. " * 30
TALK = [{"role": "user", "content": WORDS}]
ROUTES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 8},
    "/v1/completions": {"prompt": WORDS, "max_tokens": 8},
    "/v1/messages": {"messages": TALK, "max_tokens": 8},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 8},
}


def usages(app: App, route: str, body: Json) -> list[Json]:
    """All usages that stand in the events of a stream."""
    found: list[Json] = []

    def search(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("usage"), dict):
                found.append(value["usage"])
            for each in value.values():
                search(each)

    lines = httpx.post(app.url + route, json=body, timeout=60).text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            search(json.loads(line[6:]))
    return found


@pytest.mark.parametrize("model", ["dense", "hybrid", "sliding"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_reply_says_that_it_was_used(ask: Ask, route: str, model: str) -> None:
    """And not where all of it fitted."""
    body = {**ROUTES[route], "model": model, "temperature": 0}
    _, short = ask(route, **body, context_len=64)
    assert short["usage"]["x_context_rotated"] is True
    _, whole = ask(route, **body)
    assert "x_context_rotated" not in whole["usage"]
    _, long = ask(route, **body, context_len=4000)
    assert "x_context_rotated" not in long["usage"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_says_it_with_its_usage(native_app: App, route: str) -> None:
    body = {**ROUTES[route], "model": "dense", "stream": True, "context_len": 64}
    assert usages(native_app, route, body)[-1]["x_context_rotated"] is True


@pytest.mark.parametrize("route", ROUTES)
def test_a_bad_length_names_its_range(ask: Ask, route: str) -> None:
    for asked in (-1, 0, 15, 12_001):
        status, body = ask(route, **ROUTES[route], model="dense", context_len=asked)
        assert status == 400
        assert "context_len must be 16..12000" in json.dumps(body)
    for wrong in ("long", 1.5, True):
        status, body = ask(route, **ROUTES[route], model="dense", context_len=wrong)
        assert status in (400, 422)
        assert "context_len" in json.dumps(body)


def test_the_page_says_why_it_is_computed_again(native_app: App, ask: Ask) -> None:
    """The second turn finds the first window; the rest is named, with its cause."""
    talk = [{"role": "user", "content": "Count. " + WORDS}]
    body = {"model": "dense", "max_tokens": 4, "temperature": 0, "context_len": 128}
    _, first = ask("/v1/chat/completions", messages=talk, **body)
    talk += [first["choices"][0]["message"], {"role": "user", "content": "And on?"}]
    _, second = ask("/v1/chat/completions", messages=talk, **body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 127
    state = httpx.get(f"{native_app.url}/admin/state", timeout=60).json()
    warmth = state["ended"][0]["warmth"]
    assert warmth["cause"] == "rotated"
    assert "128 tokens" in warmth["detail"]
    assert warmth["lost"] > 0


def test_it_is_foreseen_by_what_is_reused(native_app: App, ask: Ask) -> None:
    """However much is held of the prompt, no more than a window of it is."""
    talk = [{"role": "user", "content": "Foresee. " + WORDS * 3}]
    body = {"model": "dense", "max_tokens": 2, "messages": talk}
    ask("/v1/chat/completions", **body)
    url = f"{native_app.url}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=60)
    num_prompt = whole.json()["usage"]["prompt_tokens"]
    assert int(whole.headers["x-mlx-cached-tokens"]) == num_prompt - 1
    _, probe = ask("/v1/cache/probe", **body, context_len=64)
    assert (probe["cached_tokens"], probe["fits"]) == (63, True)
    found = httpx.post(url, json={**body, "context_len": 64}, timeout=60)
    assert int(found.headers["x-mlx-cached-tokens"]) == 63
    assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 63


def test_a_batch_says_it_of_each_answer(ask: Ask) -> None:
    body = {"model": "dense", "max_tokens": 4, "context_len": 64}
    _, found = ask("/native/batch_generate", prompts=[WORDS, "short"], **body)
    assert [row.get("x_context_rotated") for row in found["results"]] == [True, None]


def test_a_setting_rotates_what_would_be_refused(tmp_path: Path) -> None:
    """What fits is as ever; without the setting the same prompt is a 400."""
    folder = str(make_model(tmp_path / "dense", "dense"))
    settings = {"MODEL_PATH": folder, "MAX_KV_SIZE": "128"}
    body = {"prompt": WORDS, "max_tokens": 8, "temperature": 0}
    with running_sidecar(settings) as app:
        refused = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        by_hand = {**body, "context_len": 128}
        asked = httpx.post(f"{app.url}/v1/completions", json=by_hand, timeout=60)
    with running_sidecar({**settings, "CONTEXT_OVERFLOW": "rotate"}) as app:
        answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["x_context_rotated"] is True
        assert answer.json()["choices"] == asked.json()["choices"]
        url = f"{app.url}/v1/completions"
        probed = {"messages": [{"role": "user", "content": WORDS}]}
        probe = httpx.post(f"{app.url}/v1/cache/probe", json=probed, timeout=60)
        assert probe.json()["fits"] is True
        for num_tokens, status in ((16 * 128, 200), (16 * 128 + 1, 400)):
            huge = {**body, "prompt": [7] * num_tokens}
            assert httpx.post(url, json=huge, timeout=60).status_code == status
        endless = {"prompt": [7] * 20, "temperature": 0}
        ended = httpx.post(url, json=endless, timeout=60).json()["usage"]
        assert ended["completion_tokens"] <= 128
        for num_prompt in (125, 127, 128, 200):  # none is cut short near the window
            talk = {
                "prompt": [7] * num_prompt,
                "temperature": 0,
                "logit_bias": {"7": 50},
            }
            ended = httpx.post(url, json=talk, timeout=60).json()["usage"]
            assert ended["completion_tokens"] == 128


def test_quantised_windows_are_refused(tmp_path: Path) -> None:
    flags = {"CONTEXT_OVERFLOW": "rotate", "KV_BITS": "8"}
    with pytest.raises(ConfigError, match="CONTEXT_OVERFLOW=rotate needs KV_BITS=OFF"):
        load_config(flags, tmp_path / ".env", {})
    folder = str(make_model(tmp_path / "dense", "dense"))
    bits = {"MODEL_PATH": folder, "KV_BITS": "8", "KV_GROUP_SIZE": "32"}
    with running_sidecar(bits) as app:
        body = {"prompt": WORDS, "max_tokens": 8, "context_len": 64}
        answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "context_len"
