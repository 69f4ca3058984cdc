"""The examples, run as they stand."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from sidecar.app import App
from testkit.launcher import Launcher
from testkit.pictures import encoded, picture
from testkit.proxy import Proxy
from testkit.scripted import Answer, Call, Prompt, Switch, render
from testkit.servers import running_sidecar

EXAMPLES = Path(__file__).parents[2] / "examples"
CLOUD = "claude-sonnet-4-5"


def agent(
    proxy: Proxy, folder: Path, *arguments: str
) -> "subprocess.CompletedProcess[str]":
    """The example agent in a process of its own."""
    command = [sys.executable, str(EXAMPLES / "agent.py"), *arguments]
    command += ["--url", f"{proxy.url}/v1", "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_agent_uses_its_tools(proxy: Proxy, switch: Switch, tmp_path: Path) -> None:
    """It lists, reads and answers; what it may not see it is told so."""
    (tmp_path / "notes.txt").write_text("the secret word is heron")
    calls = (
        Call("list_files", {"path": "."}),
        Call("read_file", {"path": "notes.txt"}),
        Call("read_file", {"path": "/etc/hostname"}),
    )

    def script(prompt: Prompt) -> str:
        if prompt.num_answers < len(calls):
            call = calls[prompt.num_answers]
            return render(Answer("I look.", "", (call,)), prompt)
        results = [turn.text for turn in prompt.turns if turn.role == "tool"]
        return render(Answer("", " | ".join(results)), prompt)

    switch.script = script
    done = agent(proxy, tmp_path, "What does notes.txt say?")
    assert done.returncode == 0, done.stderr
    *turns, answer = done.stdout.splitlines()
    assert [turn.split(" (")[0] for turn in turns] == [
        "- list_files", "- read_file", "- read_file", "- answer",
    ]  # fmt: skip
    listed, read, refused = answer.split(" | ")
    assert (listed, read) == ("notes.txt", "the secret word is heron")
    assert refused.startswith("error: ")
    assert "(0 of" not in turns[-1]


def test_the_agent_says_why_a_picture_is_refused(proxy: Proxy, tmp_path: Path) -> None:
    """The scripted model takes text only: the server's own words, no traceback."""
    image = tmp_path / "a.png"
    image.write_bytes(encoded(picture(1)))
    done = agent(proxy, tmp_path, "What is this?", "--image", str(image))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "image" in done.stderr
    assert "Traceback" not in done.stderr


def test_openclaw_is_told_a_model_that_is_there(proxy: Proxy, switch: Switch) -> None:
    """The provider's place, API and model, asked as it names them."""
    switch.script = lambda prompt: render(Answer("", "Hello."), prompt)
    told = json.loads((EXAMPLES / "openclaw" / "openclaw.json").read_text())
    name, model = told["agents"]["defaults"]["model"]["primary"].split("/")
    provider = told["models"]["providers"][name]
    assert provider["api"] == "openai-completions"
    assert httpx.URL(provider["baseUrl"]).port == 4000
    (entry,) = provider["models"]
    assert entry["id"] == model
    base_url = f"{proxy.url}{httpx.URL(provider['baseUrl']).path}"
    with openai.OpenAI(base_url=base_url, api_key=provider["apiKey"]) as client:
        answer = client.chat.completions.create(
            model=model,
            max_tokens=entry["maxTokens"],
            messages=[{"role": "user", "content": "Hello"}],
        )
    assert answer.choices[0].message.content == "Hello."


@pytest.fixture
def cloud() -> Iterator[App]:
    """A stand-in for the cloud: another sidecar, which speaks Messages as it does."""
    with running_sidecar({"MODEL_ALIASES": json.dumps({CLOUD: "default"})}) as running:
        yield running


@pytest.fixture
def router(cloud: App, tmp_path: Path) -> Iterator[Launcher]:
    """The launcher with the mixed configuration; locally only short prompts fit."""
    launcher = Launcher(
        tmp_path, "--config", str(EXAMPLES / "mixed_router.yaml"),
        ANTHROPIC_API_KEY="any", ANTHROPIC_API_BASE=cloud.url, MAX_KV_SIZE="512",
        MODEL_DIR="none",
    )  # fmt: skip
    try:
        launcher.wait_for("Ctrl-C")
        yield launcher
    finally:
        launcher.process.terminate()
        launcher.wait()


def test_the_mixed_router_sends_what_is_too_long_to_the_cloud(
    router: Launcher, cloud: App
) -> None:
    """Only that, and never what was asked of `private`."""

    def ask(model: str, num_words: int) -> httpx.Response:
        said = [{"role": "user", "content": "word " * num_words}]
        body = {"model": model, "messages": said, "max_tokens": 4}
        return httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=120)

    def asked() -> int:
        told = httpx.get(f"{cloud.url}/metrics", timeout=60).text
        lines = [
            line
            for line in told.splitlines()
            if line.startswith("mlx_requests_total") and "/v1/messages" in line
        ]
        return sum(int(float(line.split()[-1])) for line in lines)

    for model in ("local", "private", "cloud"):
        assert ask(model, 5).status_code == 200
    assert asked() == 1
    assert ask("local", 2000).status_code == 200
    assert asked() == 2
    refused = ask("private", 2000)
    assert refused.status_code == 400
    assert "context" in refused.json()["error"]["message"]
    assert asked() == 2
