"""
Settings: the one place that reads the environment.

Sources, later wins: default, `.env`, process environment, flag
(`ENV_FILE_OVERRIDES=true` lets `.env` beat the environment). Every name also works
as `MLX_SERVER_<NAME>`. A bad value stops the start with the variable and its range.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from sidecar.setting_sources import load_section, order_sources, setting
from sidecar.setting_values import (
    boolean,
    choice,
    integer,
    number,
    place,
    policy,
    size,
    words,
)


def cache_home() -> Path:
    """Where files that outlive a run go."""
    chosen = os.environ.get("MLX_CACHE_HOME") or os.environ.get("EXO_CACHE_HOME")  # noqa: TID251
    return Path(chosen or "~/.cache/litellm-mlx").expanduser()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The listener: address, who may come in, limits, times."""

    host: str = setting("127.0.0.1", "MLX_HOST", str, ("MLX_SERVER_HOST",))
    port: int = setting(8080, "MLX_PORT", integer(0, 65535), ("MLX_SERVER_PORT",))
    api_key: str | None = setting(None, "MLX_API_KEY", str, ("MLX_SERVER_API_KEY",))
    admin_token: str | None = setting(
        None, "ADMIN_TOKEN", str, ("MLX_SERVER_ADMIN_TOKEN",)
    )
    cors_allow_origins: tuple[str, ...] = setting((), "CORS_ALLOW_ORIGINS", words)
    allowed_hosts: tuple[str, ...] = setting((), "ALLOWED_HOSTS", words)
    max_body_mb: int = setting(64, "MAX_BODY_MB", integer(1, 4096))
    max_connections: int = setting(128, "MAX_CONNECTIONS", integer(1, 65536))
    keepalive_s: float = setting(15.0, "KEEPALIVE_SECONDS", number(0.1, 3600))
    timeout_chat_s: float = setting(900.0, "TIMEOUT_CHAT_SECONDS", number(1, 86400))
    timeout_completions_s: float = setting(
        600.0, "TIMEOUT_COMPLETIONS_SECONDS", number(1, 86400)
    )
    drain_timeout_s: float = setting(30.0, "DRAIN_TIMEOUT_SECONDS", number(0, 3600))
    metrics_enabled: bool = setting(True, "METRICS_ENABLED", boolean)
    # From the launcher alone: see server/gate.proof.
    instance_secret: str | None = setting(None, "MLX_INSTANCE_SECRET", str)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, under which names."""

    path: str | None = setting(None, "MODEL_PATH", place, ("MLX_SERVER_DEFAULT_MODEL",))
    family: str | None = setting(
        None,
        "MODEL_FAMILY",
        choice("qwen3", "glm4", "generic", "qwen", "qen3", "glm", "glm-4"),
    )
    proxy_model_id: str | None = setting(None, "PROXY_MODEL_ID", str)
    trust_remote_code: bool = setting(False, "TRUST_REMOTE_CODE", boolean)
    load_wait_s: float = setting(30.0, "LOAD_WAIT_SECONDS", number(0, 3600))


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults of a generation; None leaves the choice to the model's own file."""

    temperature: float | None = setting(None, "DEFAULT_TEMPERATURE", number(0, 5))
    top_p: float | None = setting(None, "DEFAULT_TOP_P", number(0, 1))
    top_k: int | None = setting(None, "DEFAULT_TOP_K", integer(-1, 1 << 20))
    min_p: float | None = setting(None, "DEFAULT_MIN_P", number(0, 1))
    repetition_penalty: float | None = setting(
        None, "DEFAULT_REPETITION_PENALTY", number(0.01, 10)
    )
    repetition_context_size: int = setting(
        256, "DEFAULT_REPETITION_CONTEXT_SIZE", integer(1, 1 << 20)
    )
    thinking: bool = setting(
        True, "DEFAULT_THINKING", boolean, ("DEFAULT_ENABLE_THINKING",)
    )
    preserve_thinking: bool = setting(True, "PRESERVE_THINKING", boolean)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The batch loop: context, chunks, places, times."""

    max_kv_size: int = setting(196608, "MAX_KV_SIZE", integer(16, 1 << 24))
    default_max_tokens: int | None = setting(
        None, "DEFAULT_MAX_TOKENS", integer(1, 1 << 24)
    )
    prefill_step_size: int = setting(2048, "PREFILL_STEP_SIZE", integer(16, 65536))
    enable_batching: bool = setting(True, "ENABLE_BATCHING", boolean)
    batch_max_size: int = setting(
        8, "BATCH_MAX_SIZE", integer(1, 256), ("MLX_SERVER_BATCH_MAX_BATCH_SIZE",)
    )
    max_concurrent: int = setting(8, "MAX_CONCURRENT_REQUESTS", integer(1, 1024))
    max_queued: int = setting(64, "MAX_QUEUED_REQUESTS", integer(0, 65536))
    queue_timeout_s: float = setting(600.0, "QUEUE_TIMEOUT_SECONDS", number(0.1, 86400))
    max_process_bytes: int | None = setting(None, "MAX_PROCESS_MEMORY", size)
    watchdog_s: float = setting(600.0, "GENERATION_WATCHDOG_SECONDS", number(0, 86400))
    deadline_s: float = setting(
        3600.0, "GENERATION_DEADLINE_SECONDS", number(0, 604800)
    )
    decode_stall_ms: int = setting(500, "DECODE_STALL_TARGET_MS", integer(10, 60000))
    checkpoint_gap: int = setting(
        512, "SNAPSHOT_BOUNDARY_MIN_GAP_TOKENS", integer(16, 1 << 20)
    )
    max_cache_gb: float = setting(
        8.0, "MAX_CACHE_SIZE_GB", number(0, 4096), ("MLX_SERVER_MAX_CACHE_SIZE_GB",)
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV kept for reuse, and how hard it is looked for."""

    max_bytes: int | None = setting(None, "PROMPT_CACHE_MAX_BYTES", size)
    max_entries: int = setting(
        24, "PROMPT_CACHE_MAX_ENTRIES_GLOBAL", integer(1, 65536),
        ("PROMPT_CACHE_MAX_SIZE",),
    )  # fmt: skip
    ttl_s: float = setting(1800.0, "PROMPT_CACHE_TTL_SECONDS", number(0, 1e9))
    session_idle_s: float = setting(
        1800.0, "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS", number(0, 1e9)
    )
    use_block_index: bool = setting(True, "CACHE_USE_BLOCK_INDEX", boolean)
    canonicalize: bool = setting(True, "CACHE_CANONICALIZE_TOOL_CONTEXT", boolean)
    pinning: bool = setting(True, "CACHE_PINNING", boolean)
    pin_policy: dict[str, str] = setting({}, "CACHE_PIN_POLICY", policy)
    rules_file: str | None = setting(None, "CACHE_RULES_FILE", place)
    splice: bool = setting(True, "CACHE_SPLICE", boolean)
    pin_min_gain: int = setting(64, "CACHE_PIN_MIN_GAIN", integer(1, 1 << 20))
    share_between_keys: bool = setting(False, "CACHE_SHARE_BETWEEN_KEYS", boolean)
    selftest: str = setting("on_load", "CACHE_SELFTEST", choice("on_load", "off"))
    verify: bool = setting(False, "CACHE_VERIFY", boolean)
    kv_bits: str = setting("OFF", "KV_BITS", choice("OFF", "4", "8"))
    kv_group_size: str = setting("64", "KV_GROUP_SIZE", choice("32", "64", "128"))
    kv_scheme: str = setting("uniform", "KV_QUANT_SCHEME", choice("uniform"))
    quantized_kv_start: int = setting(5000, "QUANTIZED_KV_START", integer(0, 1 << 24))
    checkpoints_per_session: int = setting(
        0, "SNAPSHOT_STORE_MAX_ENTRIES_PER_SESSION", integer(0, 65536)
    )
    checkpoints_in_all: int = setting(
        64, "SNAPSHOT_STORE_MAX_ENTRIES_GLOBAL", integer(1, 65536)
    )
    healing_entries: int = setting(
        2000, "HEALING_STORE_MAX_ENTRIES", integer(1, 1 << 20)
    )
    healing_bytes: int = setting(64 << 20, "HEALING_STORE_MAX_BYTES", size)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is written where."""

    level: str = setting(
        "INFO", "LOG_LEVEL", choice("DEBUG", "INFO", "WARNING", "ERROR")
    )
    requests: bool = setting(True, "ENABLE_REQUEST_LOGGING", boolean)
    content: bool = setting(True, "LOG_CONTENT", boolean)
    root: str = setting("logs", "LOG_ROOT", place)
    max_mb: int = setting(2048, "LOG_MAX_MB", integer(1, 1_000_000))
    retention_days: float = setting(14.0, "LOG_RETENTION_DAYS", number(0, 3650))


@dataclass(frozen=True, slots=True)
class Config:
    """All sections; each part of the program receives only its own."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    generation: GenerationConfig = GenerationConfig()
    engine: EngineConfig = EngineConfig()
    cache: CacheConfig = CacheConfig()
    log: LogConfig = LogConfig()


def load_config(
    flags: Mapping[str, str], env_file: Path, environ: Mapping[str, str] | None = None
) -> Config:
    """
    Build the configuration.

    Args:
        flags: variable name -> text, from the command line; these win.
        env_file: the `.env` file; it need not exist.
        environ: the process environment, or a stand-in.
    Raises:
        ConfigError: a value is out of its range.
    """
    env = os.environ if environ is None else environ  # noqa: TID251
    sources = order_sources(flags, dotenv_values(env_file), env)
    sections: dict[str, Any] = {
        section.name: load_section(type(section.default), sources)
        for section in dataclasses.fields(Config)
    }
    return Config(**sections)
