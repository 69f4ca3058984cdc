"""
`litellm-mlx launch`: what each client is told, by a program that stands in its place.

The real ones are run by `python -m tests.clients.launched` (docs/clients.md).
"""

import json
import os
import shutil
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
from testkit.servers import running_sidecar

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
    assert told["env"]["no_proxy"] == told["env"]["NO_PROXY"]
    assert user.files() == before == HIS
    _check(name, told)


def _check(name: str, told: Mapping[str, Any]) -> None:
    """What it was told leads to an answer."""
    argv, env = told["argv"], told["env"]
    if name == "claude":
        settings = Path(argv[argv.index("--settings") + 1])
        assert stat.S_IMODE(settings.stat().st_mode) == 0o600
        own = json.loads(settings.read_text())["env"]
        assert own["ANTHROPIC_API_KEY"] == ""  # his own must not go along
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
        assert "model_context_window=196608" in argv
        key = env["LITELLM_MLX_KEY"]
        url = " ".join(argv).partition('base_url = "')[2].partition('"')[0]
    elif name == "opencode":
        config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
        provider = config["provider"]["litellm-mlx"]
        model, options = provider["models"]["local"], provider["options"]
        assert model["limit"]["context"] == 196608 > model["limit"]["output"] > 0
        assert model["modalities"] == {"input": ["text"], "output": ["text"]}
        url, key = options["baseURL"], options["apiKey"]
    else:
        config = json.loads(Path(env["QWEN_CODE_SYSTEM_SETTINGS_PATH"]).read_text())
        [model] = config["modelProviders"]["openai"]
        assert {config["fastModel"], config["advisorModel"], model["id"]} == {"local"}
        assert model["generationConfig"]["contextWindowSize"] == 196608
        assert env["QWEN_CODE_SYSTEM_DEFAULTS_PATH"].endswith("system-defaults.json")
        url, key = model["baseUrl"], env[model["envKey"]]
        assert url == env["OPENAI_BASE_URL"]
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
    (user.home / ".pi/agent/models.json").write_text("{]")
    done = user.launch("pi")
    assert done.returncode == 1
    assert "models.json cannot be read as JSON" in done.stderr
    assert os.listdir(user.home / ".pi/agent") != []
    done = user.launch("claude", "--", "--settings", "none.json")
    assert done.returncode == 1
    assert "--settings must be an object, or a file that is there" in done.stderr
    secret = json.dumps([{"env": {"ANTHROPIC_API_KEY": "sk-mine" * 99}}])
    done = user.launch("claude", "--", "--settings", secret)
    assert done.returncode == 1
    assert "sk-mine" not in done.stderr
    (user.home / ".pi/agent/models.json").write_text('{"providers": ["x"]}')
    assert "providers must be an object" in user.launch("pi").stderr
    os.mkfifo(user.home / "opencode.json")
    assert "opencode.json is no file" in user.launch("opencode").stderr


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the client was given."""
    assert done.returncode == 7, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_claude_code_asks_no_cloud_that_its_user_has_set(user: User) -> None:
    """And what he says by --settings holds, but for where the model is."""
    clouds = {"CLAUDE_CODE_USE_BEDROCK": "1", "CLAUDE_CODE_USE_VERTEX": "1"}
    own = {"env": {**clouds, "ANTHROPIC_BASE_URL": "http://x"}, "theme": "light"}
    for given in (["--settings", json.dumps(own)], [f"--settings={json.dumps(own)}"]):
        found = told(user.launch("claude", "--", "-p", *given, "hi", **clouds))
        assert found["argv"].count("--settings") == 1
        assert found["argv"][-2:] == ["-p", "hi"]
        said = json.loads(Path(found["argv"][1]).read_text())
        assert said["theme"] == "light"
        for env in (said["env"], found["env"]):
            assert env["ANTHROPIC_BASE_URL"].startswith("http://127.0.0.1:")
            assert {env[name] for name in clouds} == {""}
    words = ["-p", "--", "--settings", "hi"]
    assert told(user.launch("claude", "--", *words))["argv"][2:] == words


def test_claude_code_sends_no_proxy_of_its_settings_what_is_said(user: User) -> None:
    """An env block beats the environment; hosts that it exempts stay exempted."""
    settings = user.home / ".claude/settings.json"
    env = {"https_proxy": "http://127.0.0.1:9", "no_proxy": "intranet.corp"}
    settings.write_text(json.dumps({"env": env}))
    argv = json.loads(user.launch("claude").stdout)["argv"]
    ours = json.loads(Path(argv[argv.index("--settings") + 1]).read_text())["env"]
    for name in ("NO_PROXY", "no_proxy"):
        hosts = ours[name].split(",")
        assert {"intranet.corp", "127.0.0.1", "localhost"} <= {*hosts}


def test_qwen_code_asks_no_other_provider(user: User) -> None:
    """It joins its files' objects: who is not named beside us would be asked."""
    elsewhere = {"id": "local", "name": "local", "baseUrl": "http://127.0.0.1:9/v1"}
    own = {"modelProviders": {"custom": [elsewhere]}, "compactionModel": "custom:x",
           "providerProtocol": {"custom": "openai", "another": "openai"}}  # fmt: skip
    project = {"modelProviders": {"projects": [elsewhere], "openai": [elsewhere]}}
    for folder, said in (
        (user.home / "qwen-home", own),
        (user.home / ".qwen", project),
    ):
        folder.mkdir(exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(said))
    told = json.loads(
        user.launch("qwen", QWEN_HOME=str(user.home / "qwen-home")).stdout
    )
    ours = json.loads(Path(told["env"]["QWEN_CODE_SYSTEM_SETTINGS_PATH"]).read_text())
    providers = ours["modelProviders"]
    ((url,),) = [[one["baseUrl"] for one in providers.pop("openai")]]
    assert url == told["env"]["OPENAI_BASE_URL"]
    assert {"custom", "another", "projects", "anthropic", "gemini"} <= {*providers}
    assert not any(providers.values())
    assert ours["compactionModel"] == "local"


def test_other_providers_of_qwen_codes_are_asked_here_as_well(user: User) -> None:
    """An agent's own model fails then; an empty variable would be filled by a file."""
    told = json.loads(user.launch("qwen", ANTHROPIC_API_KEY="sk-his").stdout)["env"]
    ours = json.loads(Path(told["QWEN_CODE_SYSTEM_SETTINGS_PATH"]).read_text())["env"]
    for env in (told, ours):
        assert env["ANTHROPIC_BASE_URL"] == env["GOOGLE_GEMINI_BASE_URL"]
        assert env["OPENAI_BASE_URL"] == f"{env['ANTHROPIC_BASE_URL']}/v1"
        for name in ("ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
            assert env[name] == env["OPENAI_API_KEY"] != "sk-his"


@pytest.mark.parametrize("folder", [".qwen/agents", ".qwen/extensions/e/agents"])
def test_an_agent_that_cannot_be_led_here_is_refused(user: User, folder: str) -> None:
    agents = user.home / folder
    agents.mkdir(parents=True)
    for line in (
        "model: 'qwen-oauth:coder'",
        '"model": qwen-oauth:coder',
        "model: >-\n  qwen-oauth:coder",
        "model: !!str qwen-oauth:coder",
        "model: [qwen-oauth:coder",
    ):
        (agents / "helper.md").write_text(f"---\n{line}\n---\nHelp.\n")
        assert user.launch("qwen").returncode == 1
    done = user.launch("qwen")
    assert done.returncode == 1
    assert "helper.md has a model of qwen-oauth" in done.stderr


@pytest.mark.parametrize(
    ("file", "value"),
    [(".env", "{home}/other"), (".qwen/.env", "~/other"), ("", "~/other")],
)
def test_qwen_codes_home_is_where_it_looks_itself(
    user: User, file: str, value: str
) -> None:
    """In files of variables as well; what it is told is that place."""
    value = value.format(home=user.home)
    (user.home / "other").mkdir()
    own = {"modelProviders": {"custom": [{"id": "local"}]}}
    (user.home / "other/settings.json").write_text(json.dumps(own))
    if file:
        (user.home / file).parent.mkdir(exist_ok=True)
        (user.home / file).write_text(f"QWEN_HOME={value}\n")
    done = user.launch("qwen", **({} if file else {"QWEN_HOME": value}))
    told = json.loads(done.stdout)["env"]
    assert told["QWEN_HOME"] == str(user.home / "other")
    ours = json.loads(Path(told["QWEN_CODE_SYSTEM_SETTINGS_PATH"]).read_text())
    assert ours["modelProviders"]["custom"] == []


def test_qwen_code_is_told_one_model(user: User) -> None:
    """Two of them would end it: the user's own stands alone."""
    for own in (["--model", "other"], ["-m", "other"], ["--model=other"]):
        argv = json.loads(user.launch("qwen", "--", *own).stdout)["argv"]
        assert argv == ["--auth-type", "openai", *own]


def test_qwen_codes_settings_are_not_written_where_they_would_not_act(
    user: User,
) -> None:
    """A model of his that is called as ours would be asked instead."""
    settings = user.home / ".qwen/settings.json"
    settings.parent.mkdir(parents=True)
    forms: tuple[Any, ...] = ([{"id": "local"}], {"models": [{"name": "local"}]})
    for form in forms:
        settings.write_text(json.dumps({"modelProviders": {"openai": form}}))
        before = user.files()
        done = user.launch("qwen", "--write", "--yes")
        assert (done.returncode, user.files()) == (1, before)
        assert "a model of yours is called local" in done.stderr
    settings.write_text("{}")
    (user.home / ".qwen/.env").write_text("OPENAI_BASE_URL=http://127.0.0.1:9/v1\n")
    done = user.launch("qwen", "--write", "--yes")
    assert done.returncode == 1
    assert "OPENAI_BASE_URL in ~/.qwen/.env" in done.stderr


def test_opencodes_agents_are_on_the_local_model(user: User, tmp_path: Path) -> None:
    """Those of its user's files, of the projects', and of his variable."""
    config, far = user.home / ".config/opencode", tmp_path / "far"
    (config / "agents").mkdir(parents=True)
    (config / "opencode.jsonc").write_text(
        '{ // mine\n "agent": {"build": {"model": "other/dead"}, "plan": {}},}'
    )
    far.mkdir()
    heads = {
        config / "agents/review.md": "---\nmodel: o/d\n---\nRead.\n",
        config / "agents/marked.md": '\ufeff---\n"model": o/d\n---\n',
        config / "agents/odd.md": "---\na: [\nmodel: o/d\n---\n",
        config / "agents/json.md": '---json\n{"model": "o/d", "name": "title"}\n---\n',
        config / "agents/spaced.md": "--- \nmodel: o/d\n---\n",
        config / "agents/endless.md": "---\nmodel: o/d\n",
        config / "agents/long.md": f"---\n# {'x' * 70_000}\nmodel: o/d\n---\n",
        config / "agents/free.md": "---\nmode: all\n---\nmodel: none\n",
        config / "agents/ruled.md": "----\nmodel: none\n----\n",
        far / "linked.md": "---\n{model: o/d}\n---\n",
    }
    for file, text in heads.items():
        file.write_text(text)
    (config / "agents/folder.md").mkdir()
    (config / "agents/sub").symlink_to(far)
    (config / "agents/sub/round").symlink_to(config / "agents")
    (user.home / "opencode.json").write_text('{"mode": {"own": {"model": "o/d"}}}')
    (far / "opencode.json").write_text('{"agent": {"there": {"model": "o/d"}}}')
    agents = {"build": {"temperature": 0.5}, "said": {"model": "o/d"}}
    his = {"theme": "mine", "agent": agents, "mcp": {"x": {"PAT": "sk-of-mine"}}}
    words = ("run", f"--dir={far}", "--key", "sk-of-mine")
    done = user.launch(
        "opencode", "--", *words, OPENCODE_CONFIG_CONTENT=json.dumps(his)
    )
    assert "sk-of-mine" not in done.stderr
    said = json.loads(told(done)["env"]["OPENCODE_CONFIG_CONTENT"])
    assert said["theme"] == "mine"
    ours = {"model": "litellm-mlx/local"}
    assert said["mode"] == {"own": ours}
    assert said["agent"].pop("build") == {"temperature": 0.5, **ours}
    names = {"review", "marked", "odd", "sub/linked", "there", "said", "title"}
    names |= {"json", "spaced", "endless", "long"}
    assert {name for name, agent in said["agent"].items() if agent == ours} >= names
    assert not {"free", "plan", "folder", "ruled"} & set(said["agent"])


@pytest.mark.parametrize(
    ("words", "has_ours"),
    [
        (("run", "-c", "on"), True),
        (("--session=ses_1",), True),
        (("run", "-c", "--model", "litellm-mlx/local"), False),
        (("run", "new"), False),
    ],
)
def test_an_older_session_of_opencodes_is_on_the_local_model(
    user: User, words: tuple[str, ...], has_ours: bool
) -> None:
    """It would go on with the model that it was begun with."""
    argv = json.loads(user.launch("opencode", "--", *words).stdout)["argv"]
    ours = ["-m", "litellm-mlx/local"] if has_ours else []
    assert argv == [*ours, *words]


def test_opencodes_managed_settings_are_not_beaten(user: User, tmp_path: Path) -> None:
    """Those that choose a model end the start, with the file's name."""
    managed = {"OPENCODE_TEST_MANAGED_CONFIG_DIR": str(tmp_path)}
    file = tmp_path / "opencode.json"
    file.write_text('{"theme": "ours"}')
    assert user.launch("opencode", **managed).returncode == 7  # the client's own
    file.write_text('{"agent": {"build": {"model": "o/d"}}}')
    done = user.launch("opencode", **managed)
    assert done.returncode == 1
    assert f"{file} says what agent is" in done.stderr


def test_opencode_looks_where_it_thinks_that_it_is(user: User, tmp_path: Path) -> None:
    (tmp_path / "opencode.json").write_text('{"agent": {"far": {"model": "o/d"}}}')
    told = json.loads(user.launch("opencode", PWD=str(tmp_path)).stdout)
    config = json.loads(told["env"]["OPENCODE_CONFIG_CONTENT"])
    assert config["agent"]["far"] == {"model": "litellm-mlx/local"}


@pytest.mark.parametrize(
    ("place", "text", "why"),
    [
        (".config/opencode/opencode.json", '{"agent": {"build": {"model": "o/d"}}}',
         "agents of yours have a model of their own (build)"),
        (".opencode/opencode.json", '{"model": "o/d"}', "the model is o/d"),
        (".config/opencode/opencode.json", '{"enabled_providers": ["o"]}',
         "enabled_providers does not name litellm-mlx"),
        (".config/opencode/opencode.json", '{"disabled_providers": ["litellm-mlx"]}',
         "disabled_providers names litellm-mlx"),
        (".config/opencode/opencode.json", '{"model": "o/d"}', ""),
    ],
)  # fmt: skip
def test_opencodes_settings_are_not_written_where_they_would_not_act(
    user: User, place: str, text: str, why: str
) -> None:
    """Another model in the same file is the one that is replaced."""
    (user.home / place).parent.mkdir(parents=True, exist_ok=True)
    (user.home / place).write_text(text)
    done = user.launch("opencode", "--write", "--yes")
    assert done.returncode == bool(why)
    assert why in done.stderr
    if why:
        assert (user.home / place).read_text() == text


def test_opencodes_lists_of_providers_have_the_local_one(user: User) -> None:
    """Without it among them the client ends with an unknown error."""
    folder = user.home / ".config/opencode"
    folder.mkdir(parents=True)
    lists = {"enabled_providers": ["anthropic"], "disabled_providers": ["litellm-mlx"]}
    (folder / "opencode.json").write_text(json.dumps(lists))
    told = json.loads(user.launch("opencode").stdout)
    config = json.loads(told["env"]["OPENCODE_CONFIG_CONTENT"])
    assert config["enabled_providers"] == ["anthropic", "litellm-mlx"]
    assert config["disabled_providers"] == []
    (folder / "opencode.json").unlink()
    told = json.loads(user.launch("opencode").stdout)
    assert "_providers" not in told["env"]["OPENCODE_CONFIG_CONTENT"]


@pytest.mark.parametrize("form", ["list", "entries", "nested", "included"])
def test_openclaws_agents_are_on_the_local_model(user: User, form: str) -> None:
    """A file that names other models is not included: their lists would be joined."""
    his = user.home / ".openclaw"
    (his / "more.json5").write_text(
        "// more\n{agents: {list: [{id: 'two', model: 'o/d'}]}, more: [1]}"
    )
    (his / "only.json").write_text("{timeout: 9, list: [{id: 'two'}]}")
    defaults = "defaults: {model: {primary: 'o/d', fallbacks: ['cloud/m']}}"
    agents = {
        "list": f"{{list: [{{id: 'main', model: 'o/d'}}], timeout: 9, {defaults}}}",
        "entries": "{entries: {main: {model: 'o/d', name: 'Me'}}, timeout: 9}",
        "nested": f"{{$include: './only.json', {defaults}}}",
        "included": "{timeout: 9}",
    }[form]
    (his / "openclaw.json").write_text(
        f"// mine\n{{agents: {agents}, $include: ['more.json5'], more: [2]}}"
    )
    path = told(user.launch("openclaw"))["env"]["OPENCLAW_CONFIG_PATH"]
    text = Path(path).read_text()
    said = json.loads(text)
    assert not any(model in text for model in ("o/d", "cloud/m", "$include"))
    assert said["agents"]["defaults"]["model"] == {"primary": "litellm-mlx/local"}
    assert (said["agents"]["timeout"], said["more"]) == (9, [1, 2])
    assert {"id": "two"} in said["agents"]["list"]
    if form == "entries":
        assert said["agents"]["entries"] == {"main": {"name": "Me"}}


def test_openclaws_files_that_include_each_other_are_told(user: User) -> None:
    (user.home / ".openclaw/openclaw.json").write_text("{$include: 'openclaw.json'}")
    done = user.launch("openclaw")
    assert done.returncode == 1
    assert "include each other" in done.stderr


def test_what_pi_made_first_gives_way_to_what_its_user_has(user: User) -> None:
    """A login, and talks: those made by us are among his from then on."""
    his = user.home / ".pi/agent"
    (his / "sessions/one.jsonl").unlink()
    (his / "sessions").rmdir()
    (his / "models.json").write_text('{ // mine\n "providers": {"mine": {},}}')
    own = Path(told(user.launch("pi"))["env"]["PI_CODING_AGENT_DIR"])
    assert "mine" in json.loads((own / "models.json").read_text())["providers"]
    (own / "sessions/work").mkdir(parents=True)
    (own / "sessions/work/ours.jsonl").write_text("ours\n")
    (own / "sessions/work/both.jsonl").write_text("ours\n")
    (own / "auth.json").write_text("{}")
    (his / "sessions/work").mkdir(parents=True)
    (his / "sessions/work/his.jsonl").write_text("his\n")
    (his / "sessions/work/both.jsonl").write_text("his\n")
    (his / "auth.json").write_text('{"anthropic": 1}')
    assert told(user.launch("pi"))
    assert (own / "auth.json").read_text() == '{"anthropic": 1}'
    talks = {file.name for file in (own / "sessions/work").iterdir()}
    assert talks == {"ours.jsonl", "his.jsonl", "both.jsonl", "both.2.jsonl"}
    assert (his / "sessions/work/ours.jsonl").read_text() == "ours\n"
    assert (his / "sessions/work/both.jsonl").read_text() == "his\n"
    assert (his / "sessions/work/both.2.jsonl").read_text() == "ours\n"
    assert (own / "auth.json.before").read_text() == "{}"
    # From within the launched PI, whose folder is ours.
    again = told(user.launch("pi", PI_CODING_AGENT_DIR=str(own)))
    assert again["env"]["PI_CODING_AGENT_DIR"] == str(own)
    assert (own / "auth.json").read_text() == '{"anthropic": 1}'
    shutil.rmtree(his)
    assert told(user.launch("pi"))
    assert not any(entry.is_symlink() for entry in own.iterdir())


def test_a_sidecar_with_another_key_is_not_called_dead(
    user: User, tmp_path: Path
) -> None:
    with running_sidecar({"MLX_API_KEY": "right"}) as locked:
        port = locked.url.rpartition(":")[2]
        for key, said in (("wrong", "is not its key"), ("", "is not set")):
            done = user.launch("claude", MLX_PORT=port, MLX_API_KEY=key)
            assert done.returncode == 1
            assert f"MLX_API_KEY {said}" in done.stderr


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
    assert "nothing was written; without a terminal it takes --yes" in refused.stderr
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
