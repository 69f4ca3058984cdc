"""
How each client is started on the local model; no file of its user's is written.

A client is told by its environment, its arguments, or a file of ours that includes his.
What was tried with which version stands in docs/clients.md.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from litellm_mlx.launcher.clients import claude_files, qwen_files
from litellm_mlx.launcher.clients.json_file import merged
from litellm_mlx.launcher.clients.openclaw_file import openclaw_said, without_models
from litellm_mlx.launcher.clients.opencode_agents import (
    opencode_agents,
    opencode_providers,
    opencode_settings,
    require_unmanaged,
)
from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import (
    Unreadable,
    linked_folder,
    named_json,
    object_in,
    user_json,
)

MODEL = "local"
NAME = "litellm-mlx"
_FREE = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
KEY = "LITELLM_MLX_KEY"
_SESSIONS = {"-c", "--continue", "-s", "--session"}  # of opencode: one that was begun
_ROOTS = "OPENCLAW_INCLUDE_ROOTS"  # folders that an $include may lie in
_CLOUDS = ("BEDROCK", "VERTEX", "FOUNDRY", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD",
           "MANTLE", "GATEWAY")  # fmt: skip  # of Claude Code: each beats the base URL


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
        program: to be found on PATH. arguments: ours. given: the user's, behind them.
        environ: what is set. files: of ours, by path, for the user alone.
        links: of ours as well: path -> what it leads to.
    """

    program: str
    arguments: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    links: Mapping[Path, Path] = field(default_factory=dict)
    given: Sequence[str] = ()


def claude_environ(server: Endpoint) -> dict[str, str]:
    """What Claude Code reads of its environment, or of the `env` of its settings."""
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_UNIX_SOCKET": "",  # it beats the base URL
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_FABLE_MODEL": MODEL,
        "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Else its first start changes the user's `opus` into `opus[1m]`, in his file.
        "CLAUDE_CODE_DISABLE_1M_CONTEXT": "1",
        **{f"CLAUDE_CODE_USE_{cloud}": "" for cloud in _CLOUDS},
    }


def claude(server: Endpoint, user: User) -> ClientSetup:
    """
    Claude Code: an `env` block of the user's settings would beat the environment.

    It reads the last `--settings` alone, so ours has what the user's says as well.
    """
    own, theirs, rest = claude_environ(server), {}, []
    words = iter(user.arguments)
    for word in words:
        name, is_joined, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
        elif name == "--settings" and (is_joined or (value := next(words, ""))):
            theirs = named_json(value)
        else:
            rest.append(word)
    direct = claude_files.without_proxy(user, theirs)
    text = json.dumps(merged(theirs, {"env": {**own, **direct}}), indent=1)
    file = _own_file(user, "claude-settings", text)
    ours = ("--settings", str(file))
    return ClientSetup("claude", ours, own, {file: text}, given=rest)


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


def openclaw_state(user: User) -> Path:
    """Where OpenClaw keeps its user's files."""
    named = user.environ.get("OPENCLAW_STATE_DIR")
    return Path(named) if named else user.home / ".openclaw"


def openclaw_file(user: User) -> Path:
    """Its user's configuration."""
    named = user.environ.get("OPENCLAW_CONFIG_PATH")
    return Path(named) if named else openclaw_state(user) / "openclaw.json"


def openclaw(server: Endpoint, user: User) -> ClientSetup:
    """OpenClaw: a file of ours that includes the user's; its state stays his."""
    state, his = openclaw_state(user), openclaw_file(user)
    config = openclaw_config(server)
    file = user.own / "openclaw.json"
    environ = {"OPENCLAW_CONFIG_PATH": str(file), "OPENCLAW_STATE_DIR": str(state)}
    if his.is_file():
        said = openclaw_said(his.resolve())
        rest = without_models(said)
        if rest == said:
            config = {"$include": str(his.resolve()), **config}
        else:  # it joins lists: nothing in ours could take his models away
            config = merged(rest, config)
        roots = [user.environ.get(_ROOTS), str(his.resolve().parent)]
        environ[_ROOTS] = os.pathsep.join(filter(None, roots))
    written = {file: json.dumps(config, indent=1)}
    return ClientSetup("openclaw", (), environ, written, given=user.arguments)


def pi_provider(server: Endpoint) -> dict[str, Any]:
    """What PI's models.json says of us."""
    return {
        "baseUrl": f"{server.url}/v1",
        "api": "openai-completions",
        "apiKey": server.key,
        "authHeader": True,
        "models": [_pi_model(server)],
    }


def pi_folder(user: User) -> Path:
    """Where PI keeps its user's files."""
    named = user.environ.get("PI_CODING_AGENT_DIR")
    return Path(named) if named else user.home / ".pi/agent"


def pi(server: Endpoint, user: User) -> ClientSetup:
    """PI: a folder of ours with his files linked; only its models.json is ours."""
    his, own = pi_folder(user), user.own / "pi-agent"
    if his.resolve() == own.resolve():  # started from within a PI that was launched
        his = user.home / ".pi/agent"
    models = user_json(his / "models.json")
    providers = models.get("providers", {})
    if not isinstance(providers, dict):
        raise Unreadable(f"{his / 'models.json'}: providers must be an object")
    providers = {**providers, NAME: pi_provider(server)}
    written = {own / "models.json": json.dumps({**models, "providers": providers})}
    return ClientSetup(
        "pi",
        ("--provider", NAME, "--model", MODEL),
        {"PI_CODING_AGENT_DIR": str(own)},
        written,
        linked_folder(his, own, but=("models.json",)),
        user.arguments,
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


def codex(server: Endpoint, user: User) -> ClientSetup:
    """Codex: settings on its command line; the key stands in the environment alone."""
    said = [f"{name}={value}" for name, value in codex_config(server).items()]
    arguments = [word for text in said for word in ("-c", text)]
    ours = (*arguments, "-m", MODEL)
    return ClientSetup("codex", ours, {KEY: server.key}, given=user.arguments)


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


def opencode(server: Endpoint, user: User) -> ClientSetup:
    """Opencode: settings in one variable of its environment, which beat all files."""
    require_unmanaged(user)
    name = "OPENCODE_CONFIG_CONTENT"
    config = opencode_config(server)
    his = object_in(user.environ.get(name) or "{}", name)
    settings = opencode_settings(user, his)
    for kind, agents in opencode_agents(user, settings).items():
        config[kind] = dict.fromkeys(agents, {"model": config["model"]})
    config |= opencode_providers(settings, NAME)
    environ = {name: json.dumps(merged(his, config))}
    words = {word.partition("=")[0] for word in user.arguments}
    # A session goes on with the model that it had, unless one is named.
    is_older = words & _SESSIONS and not words & {"-m", "--model"}
    ours = ("-m", config["model"]) if is_older else ()
    return ClientSetup("opencode", ours, environ, given=user.arguments)


def qwen_environ(server: Endpoint) -> dict[str, str]:
    """What Qwen Code reads of its environment, or of the `env` of its settings."""
    return {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": MODEL,
    }


def qwen_others(server: Endpoint) -> dict[str, str]:
    """
    Where its other providers' models are asked, agents' own among them: here as well.

    An empty variable would be filled from a file of the user's.
    """
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": server.key,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "GOOGLE_GEMINI_BASE_URL": server.url,
        "GEMINI_API_KEY": server.key,
        "GOOGLE_API_KEY": server.key,
    }


def qwen_providers(server: Endpoint) -> dict[str, Any]:
    """What Qwen Code's settings say of us."""
    model = {
        "id": MODEL,
        "name": MODEL,
        "baseUrl": f"{server.url}/v1",
        "envKey": "OPENAI_API_KEY",
        "generationConfig": {"contextWindowSize": server.context},
    }
    return {"openai": [model]}


def qwen_config(server: Endpoint, user: User) -> dict[str, Any]:
    """The same, so that it asks no other provider for anything."""
    none: list[str] = []
    others = dict.fromkeys(qwen_files.other_providers(user), none)
    models = ("fastModel", "advisorModel", "visionModel", "compactionModel")
    return {
        "modelProviders": {**others, **qwen_providers(server)},
        **dict.fromkeys(models, MODEL),
        **dict.fromkeys(("imageModel", "voiceModel", "modelFallbacks"), ""),
        "agents": {"builtin": {"exploreModel": "inherit"}},
        "env": {**qwen_environ(server), **qwen_others(server)},
    }


def qwen(server: Endpoint, user: User) -> ClientSetup:
    """Qwen Code: a file of ours in place of the machine's, which beats the user's."""
    qwen_files.require_local_agents(user)
    config = merged(user_json(qwen_files.machine_file(user)), qwen_config(server, user))
    text = json.dumps(config, indent=1)
    file = _own_file(user, "qwen", text)
    words = [word.partition("=")[0] for word in user.arguments]
    has_model = "-m" in words or "--model" in words  # two of them end it
    environ = {
        **qwen_environ(server),
        **qwen_others(server),
        "QWEN_HOME": str(qwen_files.qwen_home(user)),
        qwen_files.MACHINE: str(file),
        qwen_files.DEFAULTS: str(qwen_files.defaults_file(user)),
    }
    return ClientSetup(
        "qwen",
        ("--auth-type", "openai", *([] if has_model else ["-m", MODEL])),
        environ,
        {file: text},
        given=user.arguments,
    )


def _own_file(user: User, name: str, text: str) -> Path:
    """A file of ours for this start: another one, beside it, says something else."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return user.own / f"{name}-{digest}.json"


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


CLIENTS: Mapping[str, Callable[[Endpoint, User], ClientSetup]] = {
    "claude": claude,
    "openclaw": openclaw,
    "pi": pi,
    "codex": codex,
    "opencode": opencode,
    "qwen": qwen,
}
