"""The command-line agents: how each is told of the server, and run."""

import json
from pathlib import Path

from tests.clients.case import (
    Case,
    Place,
    Run,
    Said,
    call,
    npm_version,
    pip_version,
    tasks,
)

_FREE = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
_MODEL = {
    "id": "local", "name": "local", "reasoning": True, "input": ["text"],
    "contextWindow": 131072, "maxTokens": 8192, "cost": _FREE,
}  # fmt: skip
_APIS = {
    "chat": "openai-completions",
    "messages": "anthropic-messages",
    "responses": "openai-responses",
}


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1))


def _root(place: Place, wire: str) -> str:
    return place.url if wire == "messages" else f"{place.url}/v1"


def claude(place: Place) -> list[str]:
    """Claude Code, printing, four prompts in one session."""
    env = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        **dict.fromkeys(
            (
                "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
                "CLAUDE_CODE_SUBAGENT_MODEL",
            ),
            "local",
        ),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip

    def turn(place: Place, _number: int, prompt: str, first: bool) -> Said:
        tools = ["Bash", "Read", "Write", "Edit", "Task", "Agent"]
        more = [] if first else ["--continue"]
        command = [place.binary("claude", "claude"), "-p", *more]
        command += ["--permission-mode", "acceptEdits", "--allowedTools", *tools]
        return call(place, [*command, "--", prompt], env)

    def setup(place: Place) -> None:
        _write(place.project / "CLAUDE.md", "Always answer briefly.\n")

    return tasks(turn, setup, (1, 2, 3, 4))(place)


def pi(package: str, wire: str) -> Run:
    """PI, printing, three prompts in one session."""

    def env(place: Place) -> dict[str, str]:
        return {
            "PI_CODING_AGENT_DIR": str(place.home / ".pi/agent"), "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0",
        }  # fmt: skip

    def setup(place: Place) -> None:
        provider = {
            "baseUrl": _root(place, wire), "api": _APIS[wire], "apiKey": "any",
            "authHeader": True, "models": [_MODEL],
        }  # fmt: skip
        models = {"providers": {"local": provider}}
        _write(place.home / ".pi/agent/models.json", models)
        _write(place.project / "AGENTS.md", "Always answer briefly.\n")

    def turn(place: Place, _number: int, prompt: str, first: bool) -> Said:
        more = [] if first else ["--continue"]
        command = [place.binary(package, "pi"), "-p", *more, "--provider", "local"]
        command += ["--model", "local", "--thinking", "medium", prompt]
        return call(place, command, env(place))

    return tasks(turn, setup, (1, 2, 3))


def openclaw_config(place: Place, wire: str) -> dict[str, object]:
    """OpenClaw's settings for the local model."""
    provider = {
        "baseUrl": _root(place, wire), "apiKey": "any", "api": _APIS[wire],
        "models": [_MODEL],
    }  # fmt: skip
    defaults = {
        "model": {"primary": "local/local"}, "models": {"local/local": {}},
        "workspace": str(place.project), "timeoutSeconds": 240,
    }  # fmt: skip
    return {
        "agents": {"defaults": defaults},
        "gateway": {"mode": "local", "auth": {"mode": "token", "token": "local-test"}},
        "models": {"mode": "merge", "providers": {"local": provider}},
    }


def openclaw_env(place: Place) -> dict[str, str]:
    """Keeps OpenClaw in its folder and off the network."""
    state = place.home / ".openclaw"
    return {
        "OPENCLAW_STATE_DIR": str(state),
        "OPENCLAW_CONFIG_PATH": str(state / "openclaw.json"),
        "OPENCLAW_HIDE_BANNER": "1", "OPENCLAW_DISABLE_BONJOUR": "1",
    }  # fmt: skip


def openclaw(wire: str) -> Run:
    """OpenClaw's embedded agent, one turn a process; 30 requests over Chat."""

    def setup(place: Place) -> None:
        config = openclaw_config(place, wire)
        _write(place.home / ".openclaw/openclaw.json", config)

    def turn(place: Place, _number: int, prompt: str, _first: bool) -> Said:
        command = [place.binary("openclaw", "openclaw"), "agent", "--local"]
        command += ["--agent", "main", "--session-id", "one", "--thinking", "low"]
        words = [*command, "--message", prompt]
        said = call(place, words, openclaw_env(place), limit_s=600)
        lines = [line for line in said.out.splitlines() if not line.startswith("[")]
        return Said(said.code, "\n".join(lines), said.error)

    def run(place: Place) -> list[str]:
        wrong = tasks(turn, setup, (1, 2, 3))(place)
        for _ in range(2 if wire == "chat" else 0):
            _write(place.project / "calc.py", "def add(a, b):\n    return a - b\n")
            wrong += tasks(turn, lambda _place: None, (1, 2, 3))(place)
        return wrong

    return run


def codex(place: Place) -> list[str]:
    """Codex, over Responses."""
    config = (
        'model = "local"\nmodel_provider = "local"\nmodel_context_window = 131072\n'
        '[model_providers.local]\nname = "local"\n'
        f'base_url = "{place.url}/v1"\nenv_key = "LOCAL_KEY"\nwire_api = "responses"\n'
    )

    def setup(place: Place) -> None:
        _write(place.home / ".codex/config.toml", config)
        _write(place.project / "AGENTS.md", "Always answer briefly.\n")

    def turn(place: Place, _number: int, prompt: str, first: bool) -> Said:
        env = {"CODEX_HOME": str(place.home / ".codex"), "LOCAL_KEY": "any"}
        command = [place.binary("codex", "codex"), "exec"]
        command += ["--dangerously-bypass-approvals-and-sandbox"]
        command += ["--skip-git-repo-check"]
        more = [] if first else ["resume", "--last"]
        return call(place, [*command, *more, prompt], env)

    return tasks(turn, setup, (1, 2, 3))(place)


def opencode(wire: str) -> Run:
    """opencode, with the provider packages it brings."""
    package = "anthropic" if wire == "messages" else "openai-compatible"

    def setup(place: Place) -> None:
        limit = {"context": 131072, "output": 8192}
        model = {"name": "local", "reasoning": True, "tool_call": True, "limit": limit}
        provider = {
            "npm": f"@ai-sdk/{package}", "name": "Local",
            "options": {"baseURL": f"{place.url}/v1", "apiKey": "any"},
            "models": {"local": model},
        }  # fmt: skip
        config = {
            "$schema": "https://opencode.ai/config.json", "autoupdate": False,
            "share": "disabled", "model": "local/local", "small_model": "local/local",
            "provider": {"local": provider}, "permission": {"*": "allow"},
        }  # fmt: skip
        _write(place.home / ".config/opencode/opencode.json", config)
        _write(place.project / "AGENTS.md", "Always answer briefly.\n")

    def turn(place: Place, _number: int, prompt: str, first: bool) -> Said:
        env = {
            "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }  # fmt: skip
        more = [] if first else ["--continue"]
        command = [place.binary("opencode", "opencode"), "run", *more]
        return call(place, [*command, "--model", "local/local", prompt], env)

    return tasks(turn, setup, (1, 2, 3, 4))


def qwen(place: Place) -> list[str]:
    """Qwen Code."""

    def setup(place: Place) -> None:
        settings = {
            "telemetry": {"enabled": False},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"disableAutoUpdate": True},
            "security": {"auth": {"selectedType": "openai"}},
        }  # fmt: skip
        _write(place.home / ".qwen/settings.json", settings)
        _write(place.project / "QWEN.md", "Always answer briefly.\n")

    def turn(place: Place, _number: int, prompt: str, first: bool) -> Said:
        env = {
            "OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": "any",
            "OPENAI_MODEL": "local",
        }  # fmt: skip
        more = [] if first else ["--continue"]
        command = [place.binary("qwen", "qwen"), "--yolo", "--auth-type", "openai"]
        return call(place, [*command, *more, "-p", prompt], env)

    return tasks(turn, setup, (1, 2, 3, 4))(place)


def cline(place: Place) -> list[str]:
    """Cline's CLI; resuming wants a terminal, so each task is a session."""

    def setup(place: Place) -> None:
        command = [place.binary("cline", "cline"), "auth", "-p", "openai", "-k", "any"]
        command += ["-m", "local", "-b", f"{place.url}/v1"]
        call(place, command, {}, limit_s=60)

    def turn(place: Place, _number: int, prompt: str, _first: bool) -> Said:
        return call(
            place,
            [place.binary("cline", "cline"), "--auto-approve", "true", prompt],
            {},
        )

    return tasks(turn, setup, (1, 2, 3))(place)


def continue_cli(wire: str) -> Run:
    """Continue's CLI."""
    provider = "anthropic" if wire == "messages" else "openai"

    def config(place: Place) -> Path:
        path = place.home / ".continue/config.yaml"
        _write(
            path,
            "name: local\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: local\n"
            f"    provider: {provider}\n    model: local\n    apiKey: any\n"
            f"    apiBase: {place.url}/v1\n    roles: [chat, edit, apply]\n"
            "    capabilities: [tool_use]\n",
        )
        return path

    def turn(place: Place, _number: int, prompt: str, first: bool) -> Said:
        env = {
            "CONTINUE_TELEMETRY_ENABLED": "0",
            "CONTINUE_GLOBAL_DIR": str(place.home / ".continue"),
        }
        more = [] if first else ["--resume"]
        command = [place.binary("continue", "cn"), "-p", "--auto"]
        return call(place, [*command, "--config", config(place), *more, prompt], env)

    return tasks(turn, lambda place: None, (1, 2, 3))


def gemini(place: Place) -> list[str]:
    """Gemini CLI, which speaks Google's generateContent."""

    def setup(place: Place) -> None:
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
            "telemetry": {"enabled": False},
        }
        _write(place.home / ".gemini/settings.json", settings)
        _write(place.project / "GEMINI.md", "Always answer briefly.\n")

    def turn(place: Place, _number: int, prompt: str, first: bool) -> Said:
        env = {"GEMINI_API_KEY": "any", "GOOGLE_GEMINI_BASE_URL": place.url}
        more = [] if first else ["--resume", "latest"]
        command = [place.binary("gemini", "gemini"), "--yolo", "--skip-trust"]
        return call(place, [*command, "-m", "local", *more, "-p", prompt], env)

    return tasks(turn, setup, (1, 2, 3))(place)


def aider(place: Place) -> list[str]:
    """aider, which has no tools: it sends files and reads edits."""

    def turn(place: Place, number: int, prompt: str, first: bool) -> Said:
        files = {1: ["notes.txt"], 2: ["notes.txt"], 3: ["calc.py", "test_calc.py"]}
        command = [place.clients / "aider/bin/aider", "--model", "openai/local"]
        command += ["--openai-api-base", f"{place.url}/v1", "--openai-api-key", "any"]
        command += ["--no-check-update", "--analytics-disable", "--yes-always"]
        command += ["--no-show-model-warnings", "--no-show-release-notes"]
        command += ["--no-suggest-shell-commands", "--edit-format", "diff"]
        command += ["--no-detect-urls", "--no-fancy-input", "--no-pretty"]
        command += [] if first else ["--restore-chat-history"]
        command += ["--message", prompt, *files[number]]
        return call(place, command, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})

    return tasks(turn, lambda place: None, (1, 2, 3))(place)


_CLAUDE = npm_version("claude", "@anthropic-ai/claude-code")
_PI = npm_version("pi", "@mariozechner/pi-coding-agent")
_PI2 = npm_version("pi2", "@earendil-works/pi-coding-agent")
_OPENCLAW = npm_version("openclaw", "openclaw")
_OPENCODE = npm_version("opencode", "opencode-ai")
_QWEN = npm_version("qwen", "@qwen-code/qwen-code")
_CONTINUE = npm_version("continue", "@continuedev/cli")
_GEMINI = npm_version("gemini", "@google/gemini-cli")
_TWO = ("chat", "messages")

CASES = [
    Case("claude", "Claude Code", "messages", _CLAUDE, claude),
    *(Case(f"pi-{w}", "PI (mariozechner)", w, _PI, pi("pi", w)) for w in _APIS),
    *(Case(f"pi2-{w}", "PI (earendil-works)", w, _PI2, pi("pi2", w)) for w in _APIS),
    *(
        Case(f"openclaw-{w}", "OpenClaw, local", w, _OPENCLAW, openclaw(w), False)
        for w in _APIS
    ),
    Case("codex", "Codex", "responses", npm_version("codex", "@openai/codex"), codex),
    *(Case(f"opencode-{w}", "opencode", w, _OPENCODE, opencode(w)) for w in _TWO),
    Case("qwen", "Qwen Code", "chat", _QWEN, qwen, False),
    Case("gemini-cli", "Gemini CLI", "generateContent", _GEMINI, gemini),
    Case("cline", "Cline", "chat", npm_version("cline", "cline"), cline),
    *(
        Case(f"continue-{w}", "Continue", w, _CONTINUE, continue_cli(w), False)
        for w in _TWO
    ),
    Case("aider", "aider", "chat", pip_version("aider", "aider-chat"), aider, False),
]
