"""A request that leaves for another model: told in one line, and not kept waiting."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import litellm
import pytest
import yaml

import litellm_mlx
from litellm_mlx.errors import from_delimiters, make_error
from litellm_mlx.fallback_notice import reason, tell
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar
from tests.litellm_mlx.proxy_client import CHAT, HI, both_modes, post
from tests.litellm_mlx.sidecar_answers import problem

PAGE = (Path(__file__).parents[2] / "docs" / "router.md").read_text()
TOO_SLOW = "the first token would take about 34.4 s, and mlx_max_ttft_s is 20"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (make_error(503, "too_slow", TOO_SLOW, "m"), "would need 34 s"),
        (from_delimiters({"message": "no", "code": "rate_limited"}, "m"), "is busy"),
        (make_error(503, "", "the MLX sidecar is not reachable: x", "m"),
         "is not reachable"),
        (make_error(408, "", "the MLX sidecar fell silent: x", "m"), "fell silent"),
        (ValueError("first line\nsecond"), "failed: first line"),
        (ValueError(), "failed: ValueError"),
    ],
)  # fmt: skip
def test_the_reason_in_a_few_words(error: Exception, words: str) -> None:
    """What the sidecar said, for a person in passing."""
    assert reason(error) == words


def test_a_name_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Model names come from clients."""
    tell("cloud", "a\n-> free: b\x1b[2J", ValueError("x"), failed=False)
    (record,) = caplog.records
    assert record.getMessage() == "-> cloud: a?-> free: b?[2J failed: x"


@both_modes
@pytest.mark.parametrize(
    ("model", "script", "line"),
    [
        ("fb-late", problem(503, "too_slow", TOO_SLOW, retry_after="34"),
         "-> cloud: fb-late would need 34 s"),
        ("fb-503", problem(503, "service_unavailable", "loading", retry_after="7"),
         "-> cloud: fb-503 is not ready"),
        ("fb-context", problem(400, "context_length_exceeded", "too long"),
         "-> cloud: fb-context is too small for the prompt"),
        ("fb-dead", None, "-> cloud: fb-dead is not reachable"),
    ],
)  # fmt: skip
def test_the_proxy_says_so(
    proxy: Proxy,
    sidecar: FakeSidecar,
    model: str,
    script: Any,
    line: str,
    stream: bool,
) -> None:
    """One line where the launcher shows it, each time; whole and streamed."""
    if script is not None:
        sidecar.on(model, script)
    before = proxy.log.read_text().count(line)
    answer = post(proxy, CHAT, model, stream=stream)
    assert "from the cloud" in answer.text
    assert proxy.log.read_text().count(line) == before + 1


def test_the_readmes_router_falls_back_without_a_second_try(
    sidecar: FakeSidecar,
    cloud: FakeSidecar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its snippet in a real router: one refusal, no sleep for Retry-After."""
    snippet = next(
        yaml.safe_load(text)
        for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
        if "fallbacks" in text
    )
    provider = {"provider": "mlx", "custom_handler": litellm_mlx.mlx_llm}
    monkeypatch.setattr(litellm, "custom_provider_map", [provider])
    params = [entry["litellm_params"] for entry in snippet["model_list"]]
    params[0].update(model="mlx/readme", api_base=sidecar.base)
    params[1].update(model="hosted_vllm/big", api_base=cloud.base, api_key="x")
    refusal = problem(503, "too_slow", TOO_SLOW, retry_after="34")
    sidecar.on("readme", refusal)

    async def ask() -> Any:
        router = litellm.Router(
            model_list=snippet["model_list"], **snippet["router_settings"]
        )
        return await router.acompletion(model="local", messages=HI)

    with caplog.at_level(logging.WARNING, "litellm_mlx"):
        answer = asyncio.run(ask())
    assert answer.choices[0].message.content == "from the cloud"
    assert len(sidecar.calls_for("readme")) == 1
    said = [r.getMessage() for r in caplog.records if r.name.startswith("litellm_mlx")]
    assert said == ["-> cloud: local would need 34 s"]
