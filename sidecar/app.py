"""The composition root: builds everything and wires it together."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from sidecar.config.settings import Config
from sidecar.config.sources import ConfigError
from sidecar.engine.batch_loop import BatchLoop, ExtraProcessors, no_extra_processors
from sidecar.engine.device_memory import device_memory, process_limit
from sidecar.engine.download_progress import DownloadProgress
from sidecar.engine.gpu_thread import GpuThread, gpu_thread
from sidecar.engine.loader import LoadedModel, kv_quantization, load
from sidecar.engine.memory import MemoryGuard, fit_memory
from sidecar.engine.model_place import ModelSource, model_name
from sidecar.engine.model_source import find_model
from sidecar.engine.self_test import LOAD_S, SelfTest, prove
from sidecar.engine.text import TextEngine
from sidecar.engine.warm_up import warm_up
from sidecar.infra.metrics import Metrics
from sidecar.infra.session_log import LogLimits, SessionLog
from sidecar.kv.eviction import Limits
from sidecar.kv.prefix_store import PrefixStore
from sidecar.memory.conversation_memory import ConversationMemory, MemoryLimits
from sidecar.pipeline.prepare import Pipeline, PipelineSettings
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import Resident
from sidecar.server.connection import Handler
from sidecar.server.listener import Listener
from sidecar.server.router import Routes, Services
from sidecar.service.cache_admin import CacheService
from sidecar.service.chat import ChatService
from sidecar.service.models import ModelService
from sidecar.service.stored_responses import StoredResponses
from sidecar.volatile.rules import RuleSet, load_rules

logger = logging.getLogger(__name__)

_CACHE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class App:
    """A built server: `serve` it, then `close` it."""

    config: Config
    listener: Listener
    pool: ResidentPool[Resident]
    gpu: GpuThread

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.config.server.host}:{self.listener.port}"

    def serve(self) -> None:
        """Load the default model and answer until `stop_listening`."""
        self.pool.start_loading()
        self.listener.serve_forever(poll_interval=0.1)

    def stop_listening(self) -> None:
        """End `serve`; from another thread."""
        self.listener.shutdown()

    def drain(self) -> None:
        """Take no new work and wait for what runs, at most the drain timeout."""
        self.pool.drain()
        deadline = time.monotonic() + self.config.server.drain_timeout_s
        while self.pool.num_leases and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self) -> None:
        """Close the socket and unload."""
        self.listener.server_close()
        self.pool.close()


def build(
    config: Config,
    extra_processors: ExtraProcessors = no_extra_processors,
    tell: Callable[[str], None] = logger.info,
) -> App:
    """
    Build a server; nothing is loaded and nobody is served yet.

    Args:
        extra_processors: more logits processors for each row (the test harness's).
        tell: takes lines for the person who waits for a download.
    Raises:
        ConfigError: the user's rules cannot be used.
        OSError: the address cannot be bound.
    """
    rules = _read_rules(config)
    metrics = Metrics()
    gpu = gpu_thread()
    parts = _Parts(gpu, metrics, DownloadProgress(tell), rules, extra_processors)
    gpu.call(lambda: prepare_device(config))
    pool = ResidentPool(
        config.model.proxy_model_id or f"openai/{model_name(config.model.path)}",
        ("local", "openai/local", model_name(config.model.path)),
        lambda: _load_resident(config, parts),
        config.model.load_wait_s,
    )
    caches = CacheService(pool)
    metrics.add_cache_source(caches.counters)
    root = Path(config.log.root) if config.log.requests else None
    limits = LogLimits(config.log.max_mb << 20, config.log.retention_days)
    log = SessionLog(root, limits, with_content=config.log.content)
    services = Services(
        ChatService(pool, config.generation, metrics, log),
        ModelService(pool, gpu, _longest_step_s(config), parts.download),
        caches,
        StoredResponses(),
        metrics,
    )
    listener = Listener(
        config.server, Routes(services, config.server), metrics, Handler
    )
    return App(config, listener, pool, gpu)


def _read_rules(config: Config) -> RuleSet:
    """Before a model is loaded: minutes later is late for a wrong file name."""
    file = config.cache.rules_file
    try:
        rules = load_rules(Path(file) if file else None)
    except ValueError as error:
        source = f"CACHE_RULES_FILE={file}" if file else "the built-in rules"
        raise ConfigError(f"{source}: {error}") from error
    if not config.cache.pin_policy:
        return rules
    try:
        return load_rules(Path(file) if file else None, config.cache.pin_policy)
    except ValueError as error:
        raise ConfigError(f"CACHE_PIN_POLICY: {error}") from error


def _longest_step_s(config: Config) -> float:
    """A single step this long is no work any more: 60 s past the watchdog."""
    return (config.engine.watchdog_s or math.inf) + 60.0


def prepare_device(config: Config) -> None:
    """Set MLX up for serving; GPU thread only."""
    mx.set_memory_limit(process_limit(config.engine))
    mx.set_cache_limit(int(config.engine.max_cache_gb * (1 << 30)))
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:  # Metal only
        mx.set_wired_limit(int(recommended))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a load needs beside the settings."""

    gpu: GpuThread
    metrics: Metrics
    download: DownloadProgress
    rules: RuleSet
    extra_processors: ExtraProcessors


def _load_resident(config: Config, parts: _Parts) -> Resident:
    limit_bytes = parts.gpu.call(lambda: process_limit(config.engine))
    source = find_model(config.model.path, parts.download, limit_bytes)
    metrics, started = parts.metrics, time.monotonic()
    # All of it on the GPU thread: a thread that made so much as an empty array and
    # then ended can abort the process at its exit.
    engine = parts.gpu.call(lambda: _load_engine(config, source, parts))
    memory = _build_memory(config, engine)
    pipeline = _build_pipeline(config, engine.model, parts.rules, memory)
    resident = Resident(engine, pipeline, memory, config.cache.share_between_keys)
    metrics.model_load_s.observe(time.monotonic() - started)
    metrics.model_bytes.labels(engine.model.name).set(engine.model.num_bytes)
    metrics.kv_bytes.set_function(lambda: engine.store.num_bytes)
    metrics.active_bytes.set_function(lambda: engine.guard.active_bytes)
    metrics.peak_bytes.set_function(lambda: engine.guard.peak_bytes)
    logger.info("ready to reuse %s", resident.start_line())
    return resident


def _load_engine(config: Config, source: ModelSource, parts: _Parts) -> TextEngine:
    cache = config.cache
    model = load(
        source,
        config.model.family,
        trust=config.model.trust_remote_code,
        quantization=kv_quantization(cache),
    )
    warm_up(model)
    limits = Limits(
        cache.max_bytes or int(device_memory() * _CACHE_SHARE),
        cache.max_entries,
        cache.ttl_s,
        cache.checkpoints_per_session,
        cache.checkpoints_in_all,
    )
    store = PrefixStore(limits, model.new_cache, model.quantization)
    store.verify = cache.verify
    memory, rate_s = fit_memory(model, config.engine.prefill_step_size)
    guard = MemoryGuard(memory, process_limit(config.engine), store)
    loop = BatchLoop(model, store, config.engine, guard, rate_s, parts.extra_processors)
    engine = TextEngine(model, loop, store, parts.gpu, config.engine)
    engine.check_splitter()
    if cache.selftest == "on_load":
        prove(engine, SelfTest(model), LOAD_S)
    return engine


def _build_memory(config: Config, engine: TextEngine) -> ConversationMemory:
    cache, model = config.cache, engine.model
    limits = MemoryLimits(
        record_ttl_s=cache.ttl_s,
        session_idle_s=cache.session_idle_s,
        healing_entries=cache.healing_entries,
        healing_bytes=cache.healing_bytes,
        use_block_index=cache.use_block_index,
    )
    return ConversationMemory(engine, model.tokenizer.decode, model.key, limits)


def _build_pipeline(
    config: Config, model: LoadedModel, rules: RuleSet, memory: ConversationMemory
) -> Pipeline:
    cache = config.cache
    settings = PipelineSettings(
        default_thinking=config.generation.thinking,
        preserve_thinking=config.generation.preserve_thinking,
        canonicalize=cache.canonicalize,
        pinning=cache.pinning,
        splicing=cache.splice and config.generation.preserve_thinking,
        min_gain=cache.pin_min_gain,
        verify=cache.verify,
    )
    think_open = model.syntax.markers.think_open
    return Pipeline(model.tokenizer, think_open, rules, settings, memory)


def serve_in_thread(app: App) -> threading.Thread:
    """Serve on a thread of its own, for a process that has other things to do."""
    thread = threading.Thread(target=app.serve, name="listener", daemon=True)
    thread.start()
    return thread
