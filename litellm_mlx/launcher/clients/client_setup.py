"""
How each client is started on the local model; no file of its user's is written.

A client is told by its environment, its arguments, or a file of ours that includes his.
What was tried with which version stands in docs/clients.md.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients.user_files import linked_folder, user_json

MODEL = "local"
NAME = "litellm-mlx"
_FREE = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
KEY = "LITELLM_MLX_KEY"
_ROOTS = "OPENCLAW_INCLUDE_ROOTS"  # folders that an $include may lie in


@dataclass(frozen=True, slots=True)
class Endpoint:
    """
    What a client must know of the server.

    Args:
        url: LiteLLM's root. key: that it wants, or any word.
        context: tokens of prompt and answer. output: most tokens of an answer.
        takes_images, reasons: of the model.
    """

    url: str
    key: str
    context: int
    output: int
    takes_images: bool = False
    reasons: bool = True


@dataclass(frozen=True, slots=True)
class ClientSetup:
    """
    A client on its way.

    Args:
        program: to be found on PATH. arguments: before the user's own.
        environ: what is set. files: of ours, by path, for the user alone.
        links: of ours as well: path -> what it leads to.
    """

    program: str
    arguments: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    links: Mapping[Path, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Folders:
    """
    Folders.

    Args:
        home: of the user. own: of ours, which nobody else reads.
        environ: the user's environment.
    """

    home: Path
    own: Path
    environ: Mapping[str, str]


def claude_environ(server: Endpoint) -> dict[str, str]:
    """What Claude Code reads of its environment, or of the `env` of its settings."""
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL,
        "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def claude(server: Endpoint, folders: Folders) -> ClientSetup:
    """Claude Code: an `env` block of the user's settings would beat the environment."""
    own = claude_environ(server)
    file = folders.own / "claude-settings.json"
    written = {file: json.dumps({"env": own}, indent=1)}
    return ClientSetup("claude", ("--settings", str(file)), own, written)


def openclaw_config(server: Endpoint) -> dict[str, Any]:
    """What OpenClaw's configuration says of us."""
    provider = {
        "baseUrl": f"{server.url}/v1",
        "apiKey": server.key,
        "api": "openai-completions",
        "models": [_pi_model(server)],
    }
    name = f"{NAME}/{MODEL}"
    return {
        "agents": {"defaults": {"model": {"primary": name}, "models": {name: {}}}},
        "models": {"mode": "merge", "providers": {NAME: provider}},
    }


def openclaw_state(folders: Folders) -> Path:
    """Where OpenClaw keeps its user's files."""
    named = folders.environ.get("OPENCLAW_STATE_DIR")
    return Path(named) if named else folders.home / ".openclaw"


def openclaw_file(folders: Folders) -> Path:
    """Its user's configuration."""
    named = folders.environ.get("OPENCLAW_CONFIG_PATH")
    return Path(named) if named else openclaw_state(folders) / "openclaw.json"


def openclaw(server: Endpoint, folders: Folders) -> ClientSetup:
    """OpenClaw: a file of ours that includes the user's; its state stays his."""
    state, his = openclaw_state(folders), openclaw_file(folders)
    config = openclaw_config(server)
    file = folders.own / "openclaw.json"
    environ = {"OPENCLAW_CONFIG_PATH": str(file), "OPENCLAW_STATE_DIR": str(state)}
    if his.is_file():
        config = {"$include": str(his.resolve()), **config}
        roots = [folders.environ.get(_ROOTS), str(his.resolve().parent)]
        environ[_ROOTS] = os.pathsep.join(filter(None, roots))
    return ClientSetup("openclaw", (), environ, {file: json.dumps(config, indent=1)})


def pi_provider(server: Endpoint) -> dict[str, Any]:
    """What PI's models.json says of us."""
    return {
        "baseUrl": f"{server.url}/v1",
        "api": "openai-completions",
        "apiKey": server.key,
        "authHeader": True,
        "models": [_pi_model(server)],
    }


def pi_folder(folders: Folders) -> Path:
    """Where PI keeps its user's files."""
    named = folders.environ.get("PI_CODING_AGENT_DIR")
    return Path(named) if named else folders.home / ".pi/agent"


def pi(server: Endpoint, folders: Folders) -> ClientSetup:
    """PI: a folder of ours with his files linked; only its models.json is ours."""
    his, own = pi_folder(folders), folders.own / "pi-agent"
    models = user_json(his / "models.json")
    providers = {**models.get("providers", {}), NAME: pi_provider(server)}
    written = {own / "models.json": json.dumps({**models, "providers": providers})}
    return ClientSetup(
        "pi",
        ("--provider", NAME, "--model", MODEL),
        {"PI_CODING_AGENT_DIR": str(own)},
        written,
        linked_folder(his, own, but=("models.json",)),
    )


def codex_config(server: Endpoint) -> dict[str, str]:
    """What Codex's configuration says of us, but the model: TOML values by key."""
    provider = (
        f'{{name = "{NAME}", base_url = "{server.url}/v1", env_key = "{KEY}", '
        'wire_api = "responses"}'
    )
    return {
        "model_provider": '"litellm_mlx"',
        "model_providers.litellm_mlx": provider,
        "model_context_window": str(server.context),
    }


def codex(server: Endpoint, folders: Folders) -> ClientSetup:
    """Codex: settings on its command line; the key stands in the environment alone."""
    said = [f"{name}={value}" for name, value in codex_config(server).items()]
    arguments = [word for text in said for word in ("-c", text)]
    return ClientSetup("codex", (*arguments, "-m", MODEL), {KEY: server.key})


def opencode_config(server: Endpoint) -> dict[str, Any]:
    """What opencode's configuration says of us."""
    limit = {"context": server.context, "output": server.output}
    kinds = ["text", "image"] if server.takes_images else ["text"]
    model = {
        "name": MODEL,
        "reasoning": server.reasons,
        "tool_call": True,
        "limit": limit,
        "modalities": {"input": kinds, "output": ["text"]},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {MODEL: model},
    }
    name = f"{NAME}/{MODEL}"
    return {"model": name, "small_model": name, "provider": {NAME: provider}}


def opencode(server: Endpoint, folders: Folders) -> ClientSetup:
    """Opencode: settings in one variable of its environment."""
    config = opencode_config(server)
    return ClientSetup("opencode", (), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def qwen_environ(server: Endpoint) -> dict[str, str]:
    """What Qwen Code reads of its environment, or of the `env` of its settings."""
    return {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": MODEL,
    }


def qwen(server: Endpoint, folders: Folders) -> ClientSetup:
    """Qwen Code."""
    arguments = ("--auth-type", "openai", "-m", MODEL)
    return ClientSetup("qwen", arguments, qwen_environ(server))


def _pi_model(server: Endpoint) -> dict[str, Any]:
    """A model as PI and OpenClaw describe one."""
    return {
        "id": MODEL,
        "name": MODEL,
        "reasoning": server.reasons,
        "input": ["text", "image"] if server.takes_images else ["text"],
        "contextWindow": server.context,
        "maxTokens": server.output,
        "cost": _FREE,
    }


CLIENTS: Mapping[str, Callable[[Endpoint, Folders], ClientSetup]] = {
    "claude": claude,
    "openclaw": openclaw,
    "pi": pi,
    "codex": codex,
    "opencode": opencode,
    "qwen": qwen,
}
