"""
`litellm-mlx launch`: what each client is told, by a program that stands in its place.

The real ones are run by `python -m tests.clients.launched` (docs/clients.md).
"""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from sidecar.app import App
from testkit.proxy import Proxy

REPO = Path(__file__).parents[2]
NAMES = ("claude", "openclaw", "pi", "codex", "opencode", "qwen")
_PROGRAM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}))
sys.exit(7)
"""
HIS = {
    ".claude/settings.json": '{"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}}',
    ".openclaw/openclaw.json": "// JSON5 of his\n{}\n",
    ".pi/agent/models.json": '{"providers": {"other": {}}, "own": 1}',
    ".pi/agent/settings.json": "{}",
    ".pi/agent/sessions/one.jsonl": "past\n",
    ".codex/config.toml": "# his\n",
}


class User:
    """Somebody's home, with programs on his PATH."""

    def __init__(self, folder: Path, proxy: Proxy, sidecar: str) -> None:
        self.home, self.programs = folder / "home", folder / "bin"
        self.programs.mkdir()
        for path, text in HIS.items():
            file = self.home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for name in NAMES:
            file = self.programs / name
            file.write_text(_PROGRAM)
            file.chmod(0o755)
        self.env = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(self.home),
            "PYTHONPATH": str(REPO),
            "MLX_CACHE_HOME": str(folder / "cache"),
            "LITELLM_MLX_FOLDER": str(folder),
            "MLX_PORT": sidecar.rpartition(":")[2],
            "PROXY_PORT": proxy.url.rpartition(":")[2],
        }

    def launch(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "litellm_mlx.launcher", "launch", *words],
            cwd=self.home, env={**self.env, **env}, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    def files(self) -> Mapping[str, str]:
        """All that is his."""
        found = (p for p in self.home.rglob("*") if p.is_file())
        return {str(p.relative_to(self.home)): p.read_text() for p in found}


@pytest.fixture
def user(proxy: Proxy, scripted_sidecar: App, tmp_path: Path) -> User:
    return User(tmp_path, proxy, scripted_sidecar.url)


def answered(url: str, key: str) -> str:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        talk: Any = [{"role": "user", "content": "Hello"}]
        said = client.chat.completions.create(
            model="local", messages=talk, max_tokens=4
        )
    return said.id


@pytest.mark.parametrize("name", NAMES)
def test_a_client_is_told_and_nothing_of_his_changes(user: User, name: str) -> None:
    """It gets its own arguments behind ours, and its exit code is the command's."""
    before = user.files()
    done = user.launch(name, "--", "--resume", "a b")
    assert done.returncode == 7, done.stderr
    told = json.loads(done.stdout)
    assert told["argv"][-2:] == ["--resume", "a b"]
    assert "127.0.0.1" in told["env"]["NO_PROXY"]
    assert user.files() == before == HIS
    _check(name, told)


def _check(name: str, told: Mapping[str, Any]) -> None:
    """What it was told leads to an answer."""
    argv, env = told["argv"], told["env"]
    if name == "claude":
        settings = Path(argv[argv.index("--settings") + 1])
        assert stat.S_IMODE(settings.stat().st_mode) == 0o600
        own = json.loads(settings.read_text())["env"]
        assert own.items() <= env.items()
        assert own["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "196608"
        client = anthropic.Anthropic(
            base_url=own["ANTHROPIC_BASE_URL"], auth_token=own["ANTHROPIC_AUTH_TOKEN"]
        )
        talk: Any = [{"role": "user", "content": "Hello"}]
        model = own["ANTHROPIC_MODEL"]
        assert client.messages.create(model=model, messages=talk, max_tokens=4).id
        return
    if name == "openclaw":
        config = json.loads(Path(env["OPENCLAW_CONFIG_PATH"]).read_text())
        his = Path(config["$include"])
        assert his.read_text() == HIS[".openclaw/openclaw.json"]
        assert env["OPENCLAW_INCLUDE_ROOTS"] == str(his.parent)
        provider = config["models"]["providers"]["litellm-mlx"]
        url, key = provider["baseUrl"], provider["apiKey"]
    elif name == "pi":
        folder = Path(env["PI_CODING_AGENT_DIR"])
        assert (folder / "sessions/one.jsonl").read_text() == "past\n"
        models = json.loads((folder / "models.json").read_text())
        assert (models["own"], "other" in models["providers"]) == (1, True)
        provider = models["providers"]["litellm-mlx"]
        url, key = provider["baseUrl"], provider["apiKey"]
    elif name == "codex":
        assert "any" not in argv
        key = env["LITELLM_MLX_KEY"]
        url = " ".join(argv).partition('base_url = "')[2].partition('"')[0]
    elif name == "opencode":
        config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
        options = config["provider"]["litellm-mlx"]["options"]
        url, key = options["baseURL"], options["apiKey"]
    else:
        url, key = env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"]
    assert answered(url, key)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_would_do(user: User, name: str) -> None:
    """Keys masked; nothing is written or started."""
    done = user.launch(name, "--print", LITELLM_MASTER_KEY="sk-secret-of-mine")
    assert done.returncode == 0, done.stderr
    assert "sk-secret-of-mine" not in done.stdout + done.stderr
    assert name in done.stdout
    assert not (user.home.parent / "cache" / "launch").exists()


def test_what_cannot_be_started_says_why(user: User) -> None:
    (user.programs / "qwen").unlink()
    done = user.launch("qwen")
    assert done.returncode == 1
    assert "npm install -g" in done.stderr
    done = user.launch("claude", PROXY_PORT="1")
    assert done.returncode == 1
    assert "LiteLLM at http://127.0.0.1:1 does not answer. Fix:" in done.stderr
    assert user.launch("nobody").returncode == 2
    (user.home / ".pi/agent/models.json").write_text("// JSON5\n{}")
    done = user.launch("pi")
    assert done.returncode == 1
    assert "models.json cannot be read as JSON" in done.stderr
    assert os.listdir(user.home / ".pi/agent") != []


WRITTEN = {
    "claude": ".claude/settings.json",
    "pi": ".pi/agent/models.json",
    "opencode": ".config/opencode/opencode.json",
    "qwen": ".qwen/settings.json",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_on_request_its_settings_say_where_the_model_is(user: User, name: str) -> None:
    """The change is shown without the key; undone, all is as it was to the byte."""
    before, key = user.files(), "sk-secret-of-mine"
    refused = user.launch(name, "--write")
    assert (refused.returncode, user.files()) == (1, before)  # nobody said yes
    done = user.launch(name, "--write", "--yes", LITELLM_MASTER_KEY=key)
    assert done.returncode == 0, done.stderr
    assert "+" in done.stdout
    assert key not in done.stdout + done.stderr
    path = user.home / WRITTEN[name]
    assert key in path.read_text()
    assert {**user.files(), WRITTEN[name]: ""}.items() >= {
        **before,
        WRITTEN[name]: "",
    }.items()
    done = user.launch(name, "--undo")
    assert (done.returncode, user.files()) == (0, before), done.stderr
    assert user.launch(name, "--undo").returncode == 1
    assert user.launch(name, "--undo", "--", "words").returncode == 2


@pytest.mark.parametrize("name", ["codex", "openclaw"])
def test_a_file_with_comments_is_never_written(user: User, name: str) -> None:
    """What would be written is printed for its user."""
    done = user.launch(name, "--write", "--yes")
    assert done.returncode == 1
    assert "comments, which would be lost" in done.stderr
    assert "/v1" in done.stdout
    assert user.files() == HIS
