"""The block that is read once both servers are up."""

import json
import threading
from pathlib import Path

import pytest

from litellm_mlx.launcher.progress import telling
from litellm_mlx.launcher.ready_block import HealthReport, ready_block
from litellm_mlx.launcher.settings import Flags, load_settings
from litellm_mlx.served_models import SidecarModel

MODEL = SidecarModel("openai/mlx-tiny-agent", ("local",), "llm", 32768, True, True)


def block(folder: Path, *, needs_key: bool = False, **env: str) -> str:
    settings = load_settings(Flags(), folder, env)
    return ready_block(
        settings, [MODEL], needs_key=needs_key, health=HealthReport(9 << 30)
    )


def test_it_says_what_runs_where(tmp_path: Path) -> None:
    """Addresses, model, context, memory, key, log, a line to try: each once."""
    text = block(tmp_path)
    for words in (
        "http://127.0.0.1:4000/v1   (OpenAI clients)",
        "http://127.0.0.1:4000      (Anthropic clients)",
        "sidecar  http://127.0.0.1:8080/v1",
        "model    local, which is the small built-in model; context of 32768 tokens",
        "           a toy: ",
        "/mlx-sidecar recommend\n",
        "memory   at most 9.7 GB",
        "key      none needed, clients may send any\n",
        "reach    LiteLLM: programs on this machine, no key, the models' routes only",
        "sidecar: programs on this machine, no key\n",
        "web pages: none (CORS_ALLOW_ORIGINS)",
        f"prompts  logged in {tmp_path}/logs",
        "page     http://127.0.0.1:8080/admin/\n",
        "/litellm-mlx launch ",
        "try      curl http://127.0.0.1:4000/v1/chat/completions \\\n",
        "stop     Ctrl-C",
    ):
        assert text.count(words) == 1, words


def test_the_curl_line_carries_the_key_by_name(tmp_path: Path) -> None:
    """Where a key is needed the line to paste has it as a variable, never in words."""
    text = block(tmp_path, needs_key=True, LITELLM_MASTER_KEY="sk-secret")
    assert '-H "Authorization: Bearer $LITELLM_MASTER_KEY"' in text
    assert "key      LITELLM_MASTER_KEY" in text
    assert "sk-secret" not in text
    body = text.partition("-d '")[2].partition("'")[0]
    assert json.loads(body)["model"] == "local"


def test_it_says_who_else_gets_in(tmp_path: Path) -> None:
    """An open port, a key, a page that was let in: each where it is."""
    env = {
        "PROXY_HOST": "0.0.0.0",
        "MLX_API_KEY": "k",
        "CORS_ALLOW_ORIGINS": "http://a",
    }
    text = block(tmp_path, needs_key=True, **env)
    assert "LiteLLM: OTHER MACHINES TOO, with LITELLM_MASTER_KEY" in text
    assert "sidecar: programs on this machine, with MLX_API_KEY" in text
    assert "web pages: http://a" in text


def test_it_says_whose_cloud_keys_anybody_here_may_spend(tmp_path: Path) -> None:
    """Only as long as there is no key."""
    settings = load_settings(Flags(), tmp_path, {})

    def said(needs_key: bool) -> str:
        return ready_block(
            settings, [MODEL], needs_key=needs_key, health=HealthReport(),
            others=["cloud", "other"],
        )  # fmt: skip

    words = "and may use cloud, other on your keys (LITELLM_MASTER_KEY shuts that)"
    assert words in said(needs_key=False)
    assert "your keys" not in said(needs_key=True) + block(tmp_path)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"ENABLE_REQUEST_LOGGING": "false"}, "prompts  not logged\n"),
        ({"LOG_CONTENT": "false"}, "prompts  not logged; numbers of each request in"),
        ({"LOG_ROOT": "/var/mine"}, "logged in /var/mine "),
    ],
)
def test_it_says_whether_prompts_are_kept(
    tmp_path: Path, env: dict[str, str], words: str
) -> None:
    """And where: nobody finds their conversations on the disk by chance."""
    assert words in block(tmp_path, **env)


def test_a_real_model_is_named(tmp_path: Path) -> None:
    """Beside the name that clients use for it."""
    text = block(tmp_path, MODEL_PATH="org/some-model")
    assert "model    local, which is org/some-model; context of" in text


def test_waiting_is_told_at_once_and_then_with_the_seconds() -> None:
    """A thread of its own says so, which has ended when the wait has."""
    said: list[str] = []
    twice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            twice.set()

    with telling(say, "Loading", every_s=0.01):
        assert twice.wait(10)
    assert said[:3] == ["Loading ...", "Loading ... 0 s", "Loading ... 0 s"]


def test_waiting_tells_how_far_it_is_until_it_is_done() -> None:
    """Nothing more is said of what is there while something else is waited for."""
    said: list[str] = []
    looks = iter([None, "1 of 2 GB", "2 of 2 GB"])
    seen = threading.Event()

    def how_far() -> str | None:
        found = next(looks, None)
        if found is None and len(said) == 3:
            seen.set()
        return found

    with telling(said.append, "Loading", how_far, every_s=0.01):
        assert seen.wait(10)
    shown = ["Loading ...", "Loading ... 1 of 2 GB, 0 s", "Loading ... 2 of 2 GB, 0 s"]
    assert said == shown


def test_a_model_that_cannot_be_served_is_not_ready(tmp_path: Path) -> None:
    """The servers are up for the others; the block says so, and claims no context."""
    settings = load_settings(Flags(model="no/such"), tmp_path, {})
    fault = "there is no such folder, and no such model on the hub; check the name"
    health = HealthReport(9 << 30, fault=fault)
    text = ready_block(settings, [MODEL], needs_key=False, health=health)
    assert "local, which is no/such; IT CANNOT BE SERVED, others can:\n" in text
    assert " ".join(text.split()).count(fault) == 1
    assert "context of" not in text
    (line,) = [line for line in text.splitlines() if "no such folder" in line]
    assert len(line) <= 80
