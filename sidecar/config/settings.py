"""
Settings: each one's name, default and range, and the one reader of the environment.

Sources, later wins: default, `.env`, process environment, flag
(`ENV_FILE_OVERRIDES=true` lets `.env` beat the environment). Every name also works
as `MLX_SERVER_<NAME>`. A bad value stops the start with the variable and its range.

The sections are one table: `--help`, `.env.example` and `docs/settings.md` are made
from it (tools/write_settings.py).
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.config.device_settings import DeviceConfig
from sidecar.config.disk_settings import DiskConfig
from sidecar.config.sources import (
    ConfigError,
    Sources,
    load_section,
    order_sources,
    read_env_file,
    setting,
)
from sidecar.config.values import (
    boolean,
    choice,
    hosts,
    hub_or_folder,
    integer,
    model,
    names,
    number,
    origins,
    place,
    places,
    plain,
    policy,
    process_size,
    size,
    words,
)

_OWN = "the model's own generation_config.json"


# fmt: off
@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model"""

    path: str | None = setting(None, "MODEL_PATH", model,
        "Hugging Face id of an MLX model, a folder, or `built-in`.",
        "MLX_SERVER_DEFAULT_MODEL", shown="the built-in model")
    family: str | None = setting(None, "MODEL_FAMILY",
        choice("qwen3", "glm4", "generic", also=("qwen", "qen3", "glm", "glm-4")),
        "The model's prompt format.", shown="found out")
    proxy_model_id: str | None = setting(None, "PROXY_MODEL_ID", plain,
        "The name that clients use for the model, besides `local`.",
        shown="openai/ and MODEL_PATH")
    trust_remote_code: bool = setting(False, "TRUST_REMOTE_CODE", boolean,
        "Whether a model's folder may bring code that is run.")
    places: tuple[str, ...] | None = setting(None, "MODEL_DIR", places,
        "Folders of models; `hub`: its cache.", shown="hub")
    available: tuple[str, ...] = setting((), "AVAILABLE_MODELS", words,
        "Names of the models to serve besides MODEL_PATH; `*` stands for anything.",
        shown="all")
    aliases: dict[str, str] = setting({}, "MODEL_ALIASES", names,
        'More names of models, e.g. {"claude-*": "default"}.')
    adapters: str | None = setting(None, "ADAPTER_DIR", place,
        "Folder of LoRA adapters, a folder each; requests name them.",
        shown="none")
    draft_model: str | None = setting(None, "DRAFT_MODEL", hub_or_folder,
        "Hub id or folder of a small model with the same vocabulary, which drafts "
        "answers where SPECULATION is `draft`.", shown="none")
    pinned: tuple[str, ...] = setting((), "PINNED_MODELS", words,
        "Models that are loaded at the start and never leave.", shown="none")
    preload: tuple[str, ...] = setting((), "PRELOAD_MODELS", words,
        "Models that are loaded at the start.", "MLX_SERVER_PRELOAD_MODELS",
        shown="MODEL_PATH")
    ttl_s: float = setting(0.0, "MODEL_TTL_SECONDS", number(0, 1e9),
        "Idle seconds after which a model leaves. 0: never.")
    settings_path: str | None = setting(None, "MODEL_SETTINGS_PATH", place,
        "JSON with settings of single models, which win.", shown="in MLX_CACHE_HOME")
    load_wait_s: float = setting(900.0, "LOAD_WAIT_SECONDS", number(0, 3600),
        "How long a request waits for a model that is being loaded, if its own time "
        "limit is not shorter; then 503.")
    load_thread: str = setting("own", "MODEL_LOAD_THREAD", choice("own", "gpu"),
        "Where weights are read; `gpu`: between the steps of running streams.")
    probe_on_load: bool = setting(False, "PROBE_ON_LOAD", boolean,
        "Whether a model is asked what it can do when it was loaded, if it never was.")
    unload_keeps_kv: bool = setting(True, "UNLOAD_KEEPS_KV", boolean,
        "Whether a model's conversations outlive its weights.")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The sidecar's port, who may come in, times and limits of requests"""

    host: str = setting("127.0.0.1", "MLX_HOST", plain,
        "Where the sidecar listens; beyond this machine it needs MLX_API_KEY.",
        "MLX_SERVER_HOST")
    port: int = setting(8080, "MLX_PORT", integer(0, 65535),
        "The sidecar's port; 0: any free one.", "MLX_SERVER_PORT")
    api_key: str | None = setting(None, "MLX_API_KEY", plain,
        "The key that clients send to the sidecar; LiteLLM sends it by itself.",
        "MLX_SERVER_API_KEY", shown="none")
    admin_token: str | None = setting(None, "ADMIN_TOKEN", plain,
        "A key for /admin alone.", "MLX_SERVER_ADMIN_TOKEN",
        shown="/admin is open to this machine alone")
    cors_allow_origins: tuple[str, ...] = setting((), "CORS_ALLOW_ORIGINS", origins,
        "Origins of web pages that are let in, on both ports; LiteLLM's reads them "
        "at its start.", shown="none")
    allowed_hosts: tuple[str, ...] = setting((), "ALLOWED_HOSTS", hosts,
        "Host names that are let in, on both ports; LiteLLM's reads them at its "
        "start.", shown="this machine's own")
    batches: str | None = setting(None, "BATCH_DIR", place,
        "Folder of batches and their files, which hold what is asked and answered.",
        shown="MLX_CACHE_HOME/batches")
    max_body_mb: int = setting(64, "MAX_BODY_MB", integer(1, 4096),
        "Largest body; it holds at most a million JSON values, on LiteLLM's port a "
        "quarter of that.")
    max_connections: int = setting(128, "MAX_CONNECTIONS", integer(1, 65536),
        "Most connections; beyond, who is idle longest is asked to come back (503).")
    requests_per_minute: int = setting(0, "RATE_LIMIT_RPM", integer(0, 1_000_000),
        "Requests a minute that are taken from a key that LiteLLM knows, else from "
        "an address; then 429. Who was silent may send so many at once. 0: any "
        "number.")
    tokens_per_minute: int = setting(0, "RATE_LIMIT_TPM", integer(0, 1_000_000_000),
        "The same of tokens that are computed: of prompts, what is not reused.")
    keepalive_s: float = setting(15.0, "KEEPALIVE_SECONDS", number(0.1, 3600),
        "Longest silence of a stream: then a comment is sent.")
    timeout_chat_s: float = setting(900.0, "TIMEOUT_CHAT_SECONDS", number(1, 86400),
        "How long a chat request may take in all.")
    timeout_embeddings_s: float = setting(
        120.0, "TIMEOUT_EMBEDDINGS_SECONDS", number(1, 86400),
        "Longest time of a request for embeddings or reranking.")
    timeout_audio_s: float = setting(
        300.0, "TIMEOUT_AUDIO_SECONDS", number(1, 86400),
        "Longest time of a request for speech or a transcription.")
    timeout_completions_s: float = setting(
        600.0, "TIMEOUT_COMPLETIONS_SECONDS", number(1, 86400),
        "How long a raw completion may take in all.")
    drain_timeout_s: float = setting(30.0, "DRAIN_TIMEOUT_SECONDS", number(0, 3600),
        "How long running answers may go on after Ctrl-C.")
    metrics_enabled: bool = setting(True, "METRICS_ENABLED", boolean,
        "Whether /metrics answers.")
    # From the launcher alone: see server/access.proof.
    instance_secret: str | None = setting(None, "MLX_INSTANCE_SECRET", plain, "")
    # The same: see config/setting_sources.
    of_env_file: str | None = setting(None, "MLX_ENV_FILE_NAMES", plain, "")


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """LiteLLM and its launcher (read by those, not by the sidecar)"""

    host: str = setting("127.0.0.1", "PROXY_HOST", plain,
        "Where LiteLLM listens; beyond this machine a LITELLM_MASTER_KEY is made.")
    port: int = setting(4000, "PROXY_PORT", integer(1, 65535), "LiteLLM's port.")
    master_key: str | None = setting(None, "LITELLM_MASTER_KEY", plain,
        "The key that clients send to LiteLLM.", shown="none")
    startup_wait_s: float = setting(2.0, "PROXY_STARTUP_WAIT_SECONDS", number(0, 86400),
        "The least time that LiteLLM is given to start.")
    request_timeout_s: float = setting(
        1200.0, "PROXY_REQUEST_TIMEOUT_SECONDS", number(1, 86400),
        "The longest silence of the sidecar that LiteLLM bears.")
    folder: str | None = setting(None, "LITELLM_MLX_FOLDER", place,
        "Where commands that are called from elsewhere find .env; in the environment "
        "alone.", shown="the checkout, else the folder at hand")
    env_file_overrides: bool = setting(False, "ENV_FILE_OVERRIDES", boolean,
        "Whether .env beats the process environment.")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What a request does not say"""

    temperature: float | None = setting(None, "DEFAULT_TEMPERATURE", number(0, 5),
        "Temperature; 0 is greedy.", shown=_OWN)
    top_p: float | None = setting(None, "DEFAULT_TOP_P", number(0, 1),
        "Keep the likeliest tokens of that much probability.", shown=_OWN)
    top_k: int | None = setting(None, "DEFAULT_TOP_K", integer(-1, 1 << 20),
        "Keep that many of the likeliest tokens; 0 or -1: all.", shown=_OWN)
    min_p: float | None = setting(None, "DEFAULT_MIN_P", number(0, 1),
        "Drop tokens below that share of the likeliest one's probability.", shown=_OWN)
    repetition_penalty: float | None = setting(
        None, "DEFAULT_REPETITION_PENALTY", number(0.01, 10),
        "Above 1 makes what was said lately less likely.", shown=_OWN)
    repetition_context_size: int = setting(
        256, "DEFAULT_REPETITION_CONTEXT_SIZE", integer(1, 1 << 20),
        "Tokens that a repetition penalty looks back on.")
    thinking: bool = setting(True, "DEFAULT_THINKING", boolean,
        "Whether models reason.", "DEFAULT_ENABLE_THINKING")
    preserve_thinking: bool = setting(True, "PRESERVE_THINKING", boolean,
        "Whether past reasoning stays in the prompt.")
    omit_written: bool = setting(
        False, "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT", boolean,
        "Whether the model reads a digest in place of what past calls of a tool "
        "`write` have written.")
    tool_grammar: str = setting("strict", "TOOL_GRAMMAR", choice("strict", "calls"),
        "Which calls are held to their tool's schema where the model may choose: of "
        "tools that ask for it (`strict: true`), or all.")
    so_mode: str = setting("constrained", "SO_MODE", choice("constrained", "validate"),
        "How an answer is brought to its JSON schema: held to it as it is written, or "
        "checked when it is there, and asked for once more where it is wrong.")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Memory and speed"""

    max_process_bytes: int | None = setting(None, "MAX_PROCESS_MEMORY", process_size,
        "Memory of the process; what cannot fit is refused before it is computed.",
        shown="the device's memory (RAM, or a CUDA card's) less 8 GB")
    max_model_bytes: int | None = setting(None, "MAX_MODEL_MEMORY", size,
        "Weights of all loaded models together.", shown="what the process may take")
    max_models: int = setting(0, "MAX_MODELS", integer(0, 1024),
        "Models loaded at once. 0: as many as fit.")
    headroom: float = setting(0.25, "KV_HEADROOM_FRACTION", number(0, 2),
        "Share of a model's size that is left free for its KV, where it can be.")
    settle_s: float = setting(10.0, "SETTLE_TIMEOUT_SECONDS", number(0, 600),
        "How long the memory of a model that left is waited for.")
    max_cache_gb: float = setting(8.0, "MAX_CACHE_SIZE_GB", number(0, 4096),
        "What MLX keeps of freed memory.", "MLX_SERVER_MAX_CACHE_SIZE_GB")
    max_kv_size: int = setting(196608, "MAX_KV_SIZE", integer(16, 1 << 24),
        "Most tokens of a context.")
    context_overflow: str = setting(
        "error", "CONTEXT_OVERFLOW", choice("error", "rotate"),
        "What becomes of a longer one: it is refused, or it forgets its middle.")
    default_max_tokens: int | None = setting(
        None, "DEFAULT_MAX_TOKENS", integer(1, 1 << 24),
        "Longest answer where a request does not say.",
        shown="the context that is left, at most 32768")
    prefill_step_size: int = setting(2048, "PREFILL_STEP_SIZE", integer(16, 65536),
        "Largest prefill chunk.")
    decode_stall_ms: int = setting(500, "DECODE_STALL_TARGET_MS", integer(10, 60000),
        "Longest pause that a chunk may cause to running streams.")
    classify_batch: int = setting(32, "CLASSIFY_BATCH", integer(1, 1024),
        "Most prompts that /native/classify computes at once.")
    attention_max_tokens: int = setting(4096, "ATTENTION_MAX_TOKENS", integer(1, 65536),
        "Longest prompt of /native/attention.")
    enable_batching: bool = setting(True, "ENABLE_BATCHING", boolean,
        "Whether sequences are decoded together.")
    speculation: str = setting("auto", "SPECULATION", choice("auto", "draft", "off"),
        "Whether a lone answer that repeats what was read is computed several tokens "
        "at a time, `draft`: also by DRAFT_MODEL. The tokens are the same.")
    batch_max_size: int = setting(8, "BATCH_MAX_SIZE", integer(1, 256),
        "Most sequences decoded together.", "MLX_SERVER_BATCH_MAX_BATCH_SIZE")
    max_concurrent: int = setting(8, "MAX_CONCURRENT_REQUESTS", integer(1, 1024),
        "Answers at once.")
    max_queued: int = setting(64, "MAX_QUEUED_REQUESTS", integer(0, 65536),
        "Requests that may wait; one more gets 429 with Retry-After.")
    queue_timeout_s: float = setting(600.0, "QUEUE_TIMEOUT_SECONDS", number(0.1, 86400),
        "How long they wait; then 503.")
    watchdog_s: float = setting(600.0, "GENERATION_WATCHDOG_SECONDS", number(0, 86400),
        "An answer without progress ends with `length` after these. 0: never.")
    deadline_s: float = setting(
        3600.0, "GENERATION_DEADLINE_SECONDS", number(0, 604800),
        "Any answer ends with `length` after these. 0: never.")
    checkpoint_gap: int = setting(
        512, "SNAPSHOT_BOUNDARY_MIN_GAP_TOKENS", integer(16, 1 << 20),
        "Tokens between two kept states of models whose KV cannot be cut.")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Reuse of what was computed"""

    max_bytes: int | None = setting(None, "PROMPT_CACHE_MAX_BYTES", size,
        "KV kept, e.g. 8GB.", shown="a quarter of memory")
    max_entries: int = setting(24, "PROMPT_CACHE_MAX_ENTRIES_GLOBAL", integer(1, 65536),
        "Conversations kept.", "PROMPT_CACHE_MAX_SIZE")
    ttl_s: float = setting(1800.0, "PROMPT_CACHE_TTL_SECONDS", number(0, 1e9),
        "Idle seconds after which KV is dropped. 0: never.")
    session_idle_s: float = setting(
        1800.0, "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS", number(0, 1e9),
        "Idle seconds after which a session is forgotten. 0: never.")
    share_between_keys: bool = setting(False, "CACHE_SHARE_BETWEEN_KEYS", boolean,
        "API keys reuse each other's KV, and can find out what another one asked.")
    pinning: bool = setting(True, "CACHE_PINNING", boolean,
        "Volatile values may stay where an earlier prompt has them, the new one"
        " being said at the end; false: prompts are as they were sent.")
    splice: bool = setting(True, "CACHE_SPLICE", boolean,
        "Past turns are put back in the model's own words.")
    canonicalize: bool = setting(True, "CACHE_CANONICALIZE_TOOL_CONTEXT", boolean,
        "Prompts are compared with their volatile values left out.")
    pin_policy: dict[str, str] = setting({}, "CACHE_PIN_POLICY", policy,
        "What is done with volatile values, by their kind.")
    rules_file: str | None = setting(None, "CACHE_RULES_FILE", place,
        "TOML with rules of your own for volatile values.", shown="none")
    pin_min_gain: int = setting(64, "CACHE_PIN_MIN_GAIN", integer(1, 1 << 20),
        "Tokens that a pin must gain.")
    selftest: str = setting(
        "background", "CACHE_SELFTEST", choice("background", "on_load", "off"),
        "When a model proves that reuse changes nothing: between the first requests "
        "(a way of reuse is not used before), or at its load, which then waits.")
    verify: bool = setting(False, "CACHE_VERIFY", boolean,
        "Whether each hit is proved anew.")
    use_block_index: bool = setting(True, "CACHE_USE_BLOCK_INDEX", boolean,
        "Whether earlier prompts are found by an index; false: all are "
        "searched, with the same result.")
    kv_bits: str = setting("OFF", "KV_BITS", choice("OFF", "4", "8"),
        "KV in 8 or 4 bits, live and stored: longer contexts, a little less "
        "exact, and such sequences decode one by one.")
    kv_group_size: str = setting("64", "KV_GROUP_SIZE", choice("32", "64", "128"),
        "KV values that share a scale.")
    kv_scheme: str = setting("uniform", "KV_QUANT_SCHEME", choice("uniform"),
        "How those are rounded.")
    quantized_kv_start: int = setting(5000, "QUANTIZED_KV_START", integer(0, 1 << 24),
        "Tokens from which a sequence's KV is in those bits.")
    checkpoints_per_session: int = setting(
        0, "SNAPSHOT_STORE_MAX_ENTRIES_PER_SESSION", integer(0, 65536),
        "States kept of one session, for models whose KV cannot be cut. 0: no "
        "limit of its own.")
    checkpoints_in_all: int = setting(
        64, "SNAPSHOT_STORE_MAX_ENTRIES_GLOBAL", integer(1, 65536),
        "States kept of all sessions.")
    healing_entries: int = setting(
        2000, "HEALING_STORE_MAX_ENTRIES", integer(1, 1 << 20),
        "Turns in the model's own words, kept to be put back.")
    healing_bytes: int = setting(64 << 20, "HEALING_STORE_MAX_BYTES", size,
        "Bytes of those turns.")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Images in conversations"""

    max_mb: int = setting(20, "MAX_IMAGE_SIZE_MB", integer(1, 512),
        "Megabytes of an image as it is sent.")
    max_pixels: int = setting(
        64_000_000, "MAX_IMAGE_PIXELS", integer(1, 1_000_000_000),
        "Pixels of an image; what has more is not decoded.")
    max_images: int = setting(100, "MAX_IMAGES_PER_REQUEST", integer(1, 10_000),
        "Images of a request.")
    url_cache_s: float = setting(
        600.0, "IMAGE_URL_CACHE_SECONDS", number(0, 1e9),
        "Longest time that a URL stands for the image it gave; its headers say less.")
    feature_cache_mb: int = setting(
        256, "VISION_FEATURE_CACHE_MB", integer(0, 1 << 20),
        "Megabytes kept of what a model made of images.")
    allow_private_urls: bool = setting(False, "ALLOW_PRIVATE_IMAGE_URLS", boolean,
        "Images may be fetched from this machine and its network, too.")
    unsupported: str = setting(
        "auto", "UNSUPPORTED_IMAGES", choice("auto", "error", "note"),
        "Unseen images and files: refused, noted, or (auto) a user's new one refused.")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs"""

    level: str = setting(
        "INFO", "LOG_LEVEL", choice("DEBUG", "INFO", "WARNING", "ERROR"),
        "What is logged to the terminal.")
    requests: bool = setting(True, "ENABLE_REQUEST_LOGGING", boolean,
        "Whether each session has a log file.")
    content: bool = setting(True, "LOG_CONTENT", boolean,
        "Whether those files hold prompts and answers; false: numbers only.")
    root: str = setting("logs", "LOG_ROOT", place,
        "The folder of those files, beside .env.")
    max_mb: int = setting(2048, "LOG_MAX_MB", integer(1, 1_000_000),
        "Size of all those files together; beyond, the oldest are removed.")
    retention_days: float = setting(14.0, "LOG_RETENTION_DAYS", number(0, 3650),
        "Days after which a file that was not written to is removed. 0: never.")
    audit: bool = setting(True, "AUDIT_ENABLED", boolean,
        "Whether a row of each call is kept (docs/audit.md): no word of it.")
    audit_file: str | None = setting(None, "DATABASE_PATH", place,
        "The SQLite file of those rows.", shown="MLX_CACHE_HOME/sidecar.db")
    audit_days: float = setting(30.0, "AUDIT_RETENTION_DAYS", number(0, 3650),
        "Days after which they are deleted. 0: never.")
    audit_mb: int = setting(100, "AUDIT_MAX_MB", integer(1, 10240),
        "Size of all of them; beyond, the oldest are deleted.")
    audit_minutes: float = setting(60.0, "AUDIT_CLEANUP_INTERVAL_MINUTES",
        number(1, 1440), "Minutes between two looks at that.")


# fmt: on

# All that people set, in the order in which they read it.
SECTIONS = (
    ModelConfig,
    ServerConfig,
    LauncherConfig,
    GenerationConfig,
    EngineConfig,
    DeviceConfig,
    CacheConfig,
    DiskConfig,
    ImageConfig,
    LogConfig,
)


@dataclass(frozen=True, slots=True)
class Config:
    """All sections; each part of the program receives only its own."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    generation: GenerationConfig = GenerationConfig()
    engine: EngineConfig = EngineConfig()
    device: DeviceConfig = DeviceConfig()
    cache: CacheConfig = CacheConfig()
    disk: DiskConfig = DiskConfig()
    images: ImageConfig = ImageConfig()
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
    return config_of(order_sources(flags, read_env_file(env_file), env))


def config_of(sources: Sources) -> Config:
    """
    The configuration that sources give.

    Raises:
        ConfigError: a value is out of its range.
    """
    sections: dict[str, Any] = {
        section.name: load_section(type(section.default), sources)
        for section in dataclasses.fields(Config)
    }
    config = Config(**sections)
    if config.engine.context_overflow == "rotate" and config.cache.kv_bits != "OFF":
        raise ConfigError(
            "CONTEXT_OVERFLOW=rotate needs KV_BITS=OFF: a window of quantised KV "
            "cannot rotate"
        )
    return config
