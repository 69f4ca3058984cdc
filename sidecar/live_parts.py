"""
Which settings act while the server runs, and on what; and what is made of them.

A part names settings, and puts a configuration's values of them into effect.
"""

import logging
from collections.abc import Callable

from sidecar.config.settings import CacheConfig, Config, ServerConfig
from sidecar.engine.device_memory import device_memory, process_limit
from sidecar.engine.gpu_thread import GpuThread
from sidecar.infra.session_log import SessionLog
from sidecar.kv.eviction import Limits
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.residents.shared import Shared
from sidecar.residents.weight_eviction import PoolLimits
from sidecar.service.chat import ChatService
from sidecar.service.live_settings import Part
from sidecar.service.native import NativeService, NativeSettings
from sidecar.service.rate_limits import RateLimits

_CACHE_SHARE = 0.25  # of the device's memory, where PROMPT_CACHE_MAX_BYTES is not set


def kv_part(shared: Shared) -> Part:
    """How much KV is kept, and for how long."""
    names = (
        "PROMPT_CACHE_MAX_BYTES",
        "PROMPT_CACHE_MAX_ENTRIES_GLOBAL",
        "PROMPT_CACHE_TTL_SECONDS",
        "SNAPSHOT_STORE_MAX_ENTRIES_PER_SESSION",
        "SNAPSHOT_STORE_MAX_ENTRIES_GLOBAL",
        "MAX_PROCESS_MEMORY",
    )

    def act(config: Config) -> None:
        shared.stored.use(kv_limits(config.cache, shared.gpu))
        limit = shared.gpu.call(lambda: process_limit(config.engine))
        shared.process.limit_bytes = limit
        shared.gpu.post(shared.stored.expire)

    return Part(names, act)


def pool_part(pool: ResidentPool[ServedModel]) -> Part:
    """When models leave, and how long they are waited for."""
    names = (
        "MODEL_TTL_SECONDS",
        "MAX_MODELS",
        "KV_HEADROOM_FRACTION",
        "LOAD_WAIT_SECONDS",
        "SETTLE_TIMEOUT_SECONDS",
    )
    return Part(names, lambda config: pool.use(pool_limits(config)))


def generation_part(chat: ChatService, native: NativeService) -> Part:
    """What requests do not say, and the bounds of native ones."""
    names = (
        "DEFAULT_TEMPERATURE",
        "DEFAULT_TOP_P",
        "DEFAULT_TOP_K",
        "DEFAULT_MIN_P",
        "DEFAULT_REPETITION_PENALTY",
        "DEFAULT_REPETITION_CONTEXT_SIZE",
        "TOOL_GRAMMAR",
        "SO_MODE",
        "CLASSIFY_BATCH",
        "ATTENTION_MAX_TOKENS",
        "TIMEOUT_COMPLETIONS_SECONDS",
    )

    def act(config: Config) -> None:
        chat.use(config.generation)
        native.use(native_settings(config))

    return Part(names, act)


def door_part(use: Callable[[ServerConfig], None]) -> Part:
    """Who is let in, and how long a request may take; `use` has the server do so."""
    names = (
        "CORS_ALLOW_ORIGINS",
        "ALLOWED_HOSTS",
        "KEEPALIVE_SECONDS",
        "TIMEOUT_CHAT_SECONDS",
        "TIMEOUT_COMPLETIONS_SECONDS",
    )
    return Part(names, lambda config: use(config.server))


def rate_part(limits: RateLimits) -> Part:
    """How often a client may ask."""
    names = ("RATE_LIMIT_RPM", "RATE_LIMIT_TPM")
    return Part(names, lambda config: limits.use(config.server))


def log_level_part() -> Part:
    """What is logged."""
    logger = logging.getLogger("sidecar")
    return Part(("LOG_LEVEL",), lambda config: logger.setLevel(config.log.level))


def log_content_part(log: SessionLog) -> Part:
    """Whether the request log has what was said."""

    def act(config: Config) -> None:
        log.with_content = config.log.content

    return Part(("LOG_CONTENT",), act)


def native_settings(config: Config) -> NativeSettings:
    """The bounds of native requests."""
    timeout_s = config.server.timeout_completions_s
    return NativeSettings(timeout_s, config.engine, config.generation)


def kv_limits(cache: CacheConfig, gpu: GpuThread) -> Limits:
    """The limits of what is kept as KV, in bytes, entries and seconds."""
    return Limits(
        int(gpu.call(device_memory) * _CACHE_SHARE)
        if cache.max_bytes is None
        else cache.max_bytes,
        cache.max_entries,
        cache.ttl_s,
        cache.checkpoints_per_session,
        cache.checkpoints_in_all,
    )


def pool_limits(config: Config) -> PoolLimits:
    """The limits of the loaded models."""
    model, engine = config.model, config.engine
    return PoolLimits(
        engine.max_models,
        engine.headroom,
        model.load_wait_s,
        engine.settle_s,
        model.ttl_s,
        model.preload,
        model.pinned,
    )
