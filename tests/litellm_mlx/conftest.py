"""One fake sidecar, one fake cloud and one real LiteLLM proxy for all tests here."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml

from litellm_mlx.launcher.services import PROXY_COMMAND
from litellm_mlx.served_models import NATIVE_ROUTES, NEVER_SHUT_OUT
from testkit.proxy import free_port
from tests.litellm_mlx.fake_sidecar import FakeSidecar
from tests.litellm_mlx.sidecar_answers import Script, text_answer

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read at import
REPO = Path(__file__).resolve().parents[2]
# Raised inside litellm's own models, not by our use of them.
LIBRARY_WARNINGS = ("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning",)
LEFT_MODELS = ("left-words", "left-silence", "left-whole", "left-late")
FALLING_BACK = ("fb-dead", "fb-503", "fb-429", "fb-lost", "fb-late", "fb-native")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in LIBRARY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


class Proxy:
    """A running LiteLLM proxy and clients for it."""

    def __init__(self, url: str, log: Path, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.log = log
        same: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": 240}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **same)
        self.anthropic = anthropic.Anthropic(base_url=url, **same)
        self.http = httpx.Client(base_url=url, timeout=240, trust_env=False)

    def close(self) -> None:
        for client in (self.openai, self.anthropic, self.http):
            client.close()


@pytest.fixture(scope="session")
def sidecar() -> Iterator[FakeSidecar]:
    with FakeSidecar() as fake:
        yield fake


@pytest.fixture(scope="session")
def cloud() -> Iterator[FakeSidecar]:
    with FakeSidecar() as fake:
        script = Script(steps=text_answer("big", "from the cloud"))
        script.body = _cloud_answer()
        fake.on("big", script)
        yield fake


@pytest.fixture(scope="session")
def dead_base() -> str:
    """The URL of a sidecar that is not running."""
    return f"http://127.0.0.1:{free_port()}/v1"


@pytest.fixture(scope="session")
def proxy(
    sidecar: FakeSidecar,
    cloud: FakeSidecar,
    dead_base: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_config(sidecar.base, cloud.base, dead_base)))
    port = free_port()
    log = folder / "proxy.log"
    command = [*PROXY_COMMAND, "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(REPO),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MLX_API_KEY": "sidecar-key",
        # For the internet, not for this machine: whatever goes there fails.
        "http_proxy": "http://127.0.0.1:1",
        "ALL_PROXY": "socks5://127.0.0.1:1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=output
        )
    running = Proxy(f"http://127.0.0.1:{port}", log, process.pid)
    try:
        _wait_for_start(running, process)
        yield running
    finally:
        running.close()
        process.terminate()
        process.wait(120)


def _config(sidecar: str, cloud: str, dead: str) -> dict[str, object]:
    def deployment(name: str, base: str) -> dict[str, object]:
        target = {"model": f"mlx/{name}", "api_base": base}
        info = dict(NEVER_SHUT_OUT)
        return {"model_name": name, "litellm_params": target, "model_info": info}

    hosted = {"model": "hosted_vllm/big", "api_base": cloud, "api_key": "x"}
    handler = "litellm_mlx.provider.mlx_llm"
    known = {"mode": "chat", "max_input_tokens": 32768}
    known |= dict(NATIVE_ROUTES) | dict(NEVER_SHUT_OUT)
    falling = [name for name in FALLING_BACK if name not in ("fb-dead", "fb-native")]
    return {
        "model_list": [
            {**deployment("*", sidecar), "model_name": "mlx/*"},
            # Its bodies are sent on as they are, as the launcher has it.
            {
                **deployment("*", sidecar),
                "model_name": "native/*",
                "model_info": {**NATIVE_ROUTES, **NEVER_SHUT_OUT},
            },
            # Of models that it does not know LiteLLM makes up the streams of responses.
            *(
                {**deployment(name, sidecar), "model_info": known}
                for name in LEFT_MODELS
            ),
            deployment("dead", dead),
            {
                **deployment("native-dead", dead),
                "model_info": {**NATIVE_ROUTES, **NEVER_SHUT_OUT},
            },
            deployment("fb-dead", dead),
            *(deployment(name, sidecar) for name in [*falling, "fb-context"]),
            {
                **deployment("fb-native", sidecar),
                "model_info": {**NATIVE_ROUTES, **NEVER_SHUT_OUT},
            },
            {"model_name": "cloud", "litellm_params": hosted},
        ],
        "litellm_settings": {
            "custom_provider_map": [{"provider": "mlx", "custom_handler": handler}]
        },
        "router_settings": {
            "num_retries": 0,
            "fallbacks": [{name: ["cloud"]} for name in FALLING_BACK],
            "context_window_fallbacks": [{"fb-context": ["cloud"]}],
        },
        "general_settings": {
            "dangerously_permit_weak_or_unset_master_key": True,
            "cancel_on_disconnect": True,
        },
    }


def _wait_for_start(proxy: Proxy, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            answer = httpx.get(f"{proxy.url}/health/liveliness", trust_env=False)
            if answer.status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    pytest.fail(f"the proxy did not start:\n{proxy.log.read_text()[-4000:]}")


def _cloud_answer() -> dict[str, object]:
    message = {"role": "assistant", "content": "from the cloud"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-cloud",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "big",
        "choices": [choice],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }
