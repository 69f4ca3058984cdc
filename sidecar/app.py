"""The composition root: builds everything and wires it together."""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import mlx.core as mx

from sidecar.config.setting_sources import SettingSources
from sidecar.config.settings import Config, ImageConfig, ServerConfig
from sidecar.core.lasting_secret import use_secret
from sidecar.engine.adapters.adapter_files import AdapterFolder
from sidecar.engine.device_memory import (
    WiredMemory,
    buffer_limit,
    has_memory_of_its_own,
    much_kept,
    process_limit,
    release_delay,
)
from sidecar.engine.gpu_thread import GpuThread, gpu_thread
from sidecar.engine.kv_expiry import Expiry
from sidecar.engine.loading.download_progress import DownloadProgress
from sidecar.engine.native.memory_controls import MemoryControls
from sidecar.engine.process_memory import Admission, ProcessMemory, Releasing, Tidying
from sidecar.engine.scheduler import ExtraProcessors, no_extra_processors
from sidecar.engine.selftest.proved_models import ProvedModels
from sidecar.infra.audit_store import AuditStore
from sidecar.infra.metrics import Metrics
from sidecar.infra.recent_lines import RecentLines
from sidecar.infra.session_log import LogLimits, SessionLog
from sidecar.infra.template_limits import limit_templates
from sidecar.kv.disk.kv_disk import KVDisk
from sidecar.kv.disk.ports import DiskSettings
from sidecar.kv.disk.root import DiskLimits, DiskRoot
from sidecar.kv.eviction import KVBudget
from sidecar.kv.kv_layers import Released
from sidecar.live_parts import (
    door_part,
    generation_part,
    kv_limits,
    kv_part,
    log_content_part,
    log_level_part,
    native_settings,
    pool_limits,
    pool_part,
    rate_part,
)
from sidecar.memory.tombstones import Tombstones
from sidecar.residents.capability_record import CapabilityRecords
from sidecar.residents.catalog import Catalog, find_catalog
from sidecar.residents.draft_models import check_draft_settings, draft_fault
from sidecar.residents.kept_memories import KeptMemories
from sidecar.residents.loading import loader
from sidecar.residents.model_settings import (
    read_settings,
    settings_file,
    with_default_model,
)
from sidecar.residents.model_state import ModelSpec, ServedModel, Tell
from sidecar.residents.pool import ResidentPool
from sidecar.residents.pool_worker import LOAD_END_S
from sidecar.residents.process_weights import ProcessWeights
from sidecar.residents.shared import Shared
from sidecar.server.batch_routes import answer_call
from sidecar.server.connection import Handler
from sidecar.server.listener import ConnectionLimiter, Listener
from sidecar.server.router import Routes, Services
from sidecar.service.audio import AudioService
from sidecar.service.audit import Audit
from sidecar.service.batches.batch_runner import BatchRunner
from sidecar.service.batches.batch_service import BatchService
from sidecar.service.cache_admin import CacheService
from sidecar.service.capability_probe import CapabilityProbe
from sidecar.service.chat import ChatService, RequestRecords
from sidecar.service.encodings import EncodingService
from sidecar.service.live_settings import LiveSettings, Part
from sidecar.service.models import ModelService, Vitals
from sidecar.service.native import NativeService
from sidecar.service.rate_limits import RateLimits
from sidecar.service.request_history import RequestHistory
from sidecar.service.savings import Savings
from sidecar.service.stored_responses import StoredResponses
from sidecar.service.training import TrainingService
from sidecar.volatile.configured_rules import configured_rules

if TYPE_CHECKING:  # of the extra `vision`
    from sidecar.images.reader import ImageIntake

logger = logging.getLogger(__name__)

_GB = 1e9
_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # for the errors of what is stopped


@dataclass(frozen=True, slots=True)
class Core:
    """All but the socket: models, what they share, and the use cases."""

    config: Config
    pool: ResidentPool[ServedModel]
    shared: Shared
    expiry: Expiry
    releasing: Releasing
    tidying: Tidying
    services: Services

    def close(self, load_wait_s: float = LOAD_END_S) -> bool:
        """
        Unload; False if a load goes on all the same.

        Args:
            load_wait_s: how long the end of a load in hand is waited for.
        """
        self.expiry.close()
        self.services.savings.close()
        self.services.history.close()
        self.services.audit.close()
        logging.getLogger("sidecar").removeHandler(self.services.lines)
        has_ended = self.pool.close(load_wait_s)
        if self.shared.image_intake.cache_info().currsize:
            self.shared.image_intake().close()
        if self.shared.disk is not None:
            self.shared.disk.close()
        self.shared.kept.forget()
        for errand in (self.releasing, self.tidying):
            self.shared.gpu.remove_worker(errand)
        self.shared.gpu.call(self.shared.stored.released.let_go)
        return has_ended


@dataclass(frozen=True, slots=True)
class App:
    """A built server: `serve` it, then `close` it."""

    core: Core
    listener: Listener
    batches: BatchRunner

    @property
    def config(self) -> Config:
        """Its settings."""
        return self.core.config

    @property
    def pool(self) -> ResidentPool[ServedModel]:
        """Its models."""
        return self.core.pool

    @property
    def shared(self) -> Shared:
        """What they share."""
        return self.core.shared

    @property
    def gpu(self) -> GpuThread:
        """The thread of all forward calls."""
        return self.core.shared.gpu

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.config.server.host}:{self.listener.port}"

    @property
    def serves_others(self) -> bool:
        """Whether there are models besides the default one."""
        return any(entry.is_usable for entry in self.pool.entries()[1:])

    def serve(self) -> None:
        """Load what is wanted from the start, and answer until `stop_listening`."""
        if self.config.generation.omit_written:
            logger.warning(
                "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT: the model does not read what "
                "past calls of a tool `write` have written, but a digest of it"
            )
        file = settings_file(self.config)
        if self.config.model.settings_path and not file.exists():
            message = (
                "MODEL_SETTINGS_PATH: there is no file %s; settings by hand make it"
            )
            logger.warning(message, file)
        self.pool.start_loading()
        self.batches.start()
        self.listener.serve_forever(poll_interval=0.1)

    def stop_listening(self) -> None:
        """End `serve`; from another thread."""
        self.listener.shutdown()

    def drain(self) -> None:
        """
        Take no new work and let what runs end; after the drain timeout, stop it.

        What is stopped tells its client so: by a status, or an error in its stream.
        """
        self.batches.stop()
        self.pool.drain()
        self.shared.admission.drain()
        if not self._is_done_in(self.config.server.drain_timeout_s):
            self.pool.stop()
            self.core.services.chat.stop()
            self._is_done_in(_LAST_WORDS_S)

    def _is_done_in(self, seconds: float) -> bool:
        """Whether all answers are written within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.listener.places.work[1] or self.pool.num_leases:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self, load_wait_s: float = LOAD_END_S) -> bool:
        """
        Close the socket and unload; False if a load goes on all the same.

        Args:
            load_wait_s: how long the end of a load in hand is waited for.
        """
        self.listener.server_close()
        self.batches.stop()
        return self.core.close(load_wait_s)


def build(
    config: Config,
    extra_processors: ExtraProcessors = no_extra_processors,
    tell: Callable[[str], None] = logger.info,
    sources: SettingSources | None = None,
) -> App:
    """
    Build a server; nothing is loaded and nobody is served yet.

    Args:
        sources: where the settings came from; None: they cannot be read again.
        extra_processors: more logits processors for each row (the test harness's).
        tell: takes lines for the person who waits for a download.
    Raises:
        ConfigError: the user's rules cannot be used.
        OSError: the address cannot be bound.
    """
    core = build_core(config, extra_processors, tell, sources)
    services = core.services
    routes = Routes(services, config.server)
    engine, places = config.engine, ConnectionLimiter(config.server.max_connections)
    runner = BatchRunner(
        services.batches,
        lambda call: answer_call(routes, call),
        services.chat.cancel,
        min(engine.batch_max_size, engine.max_concurrent),
        lambda: places.work[1] + core.shared.admission.is_paused,
    )
    metrics = core.shared.metrics
    listener = Listener(
        config.server, routes, metrics, Handler, places, runner, services.audit
    )

    def use(server: ServerConfig) -> None:
        listener.config = server
        routes.use(server)

    services.settings.add(door_part(use))
    return App(core, listener, runner)


def build_core(
    config: Config,
    extra_processors: ExtraProcessors = no_extra_processors,
    tell: Callable[[str], None] = logger.info,
    sources: SettingSources | None = None,
) -> Core:
    """
    Build all of a server but its socket; nothing is loaded yet.

    Args:
        extra_processors, tell, sources: as for a server.
    Raises:
        ConfigError: the user's rules cannot be used.
    """
    limit_templates()
    shared = _build_shared(config, tell, extra_processors)
    load, after_load = loader(config, shared), list[Callable[[str], None]]()

    def load_and_tell(spec: ModelSpec, tell_step: Tell) -> ServedModel:
        resident = load(spec, tell_step)
        for begin in after_load:
            begin(spec.id)
        return resident

    pool = ResidentPool(
        lambda: read_catalog(config),
        load_and_tell,
        ProcessWeights(
            shared.process,
            shared.admission,
            shared.stored,
            shared.gpu,
            config.engine.max_model_bytes,
        ),
        pool_limits(config),
    )
    settings = LiveSettings(config, sources, (kv_part(shared), log_level_part()))
    services = _build_services(config, shared, pool, settings)
    expiry = Expiry(shared.stored, shared.gpu)
    settings.add(pool_part(pool))
    settings.add(Part(("PROMPT_CACHE_TTL_SECONDS",), lambda _: expiry.look_again()))
    if config.model.probe_on_load:
        after_load.append(services.capabilities.begin)
    releasing = Releasing(shared.stored.released, shared.gpu.wake_in)
    shared.process.wake_in = shared.gpu.wake_in
    tidying = Tidying(shared.process)
    for errand in (releasing, tidying):
        shared.gpu.add_worker(errand)
    return Core(config, pool, shared, expiry, releasing, tidying, services)


def _build_services(
    config: Config,
    shared: Shared,
    pool: ResidentPool[ServedModel],
    settings: LiveSettings,
) -> Services:
    metrics, caches = shared.metrics, CacheService(pool, shared.kept, shared.disk)
    _show_counts(shared, pool, caches)
    root = Path(config.log.root) if config.log.requests else None
    sizes = LogLimits(config.log.max_mb << 20, config.log.retention_days)
    log = SessionLog(root, sizes, with_content=config.log.content)
    vitals = Vitals(
        shared.gpu,
        _longest_step_s(config),
        shared.download,
        shared.process,
        shared.wired,
        lambda: shared.admission.is_paused,
    )
    folder = config.model.adapters
    adapters = AdapterFolder(Path(folder) if folder else None)
    home = config.disk.home
    history = RequestHistory(metrics.reuse, home / "sessions.json")
    savings = Savings(home / "savings.json", lambda: history.work)
    audit = Audit(_audit_store(config), metrics.audit_dropped.inc)
    limits = RateLimits(config.server)
    records = RequestRecords(log, history, audit, limits)
    chat = ChatService(pool, config.generation, metrics, adapters, records)
    models = ModelService(
        pool,
        vitals,
        settings_file(config),
        shared.capabilities,
        adapters,
        lambda place: draft_fault(place, config.engine.speculation),
    )
    native = NativeService(pool, chat, native_settings(config))
    settings.add(generation_part(chat, native))
    settings.add(log_content_part(log))
    settings.add(rate_part(limits))
    return Services(
        chat,
        models,
        CapabilityProbe(pool, chat, shared.capabilities),
        caches,
        EncodingService(pool, config.server.timeout_embeddings_s),
        AudioService(pool, config.server.timeout_audio_s),
        native,
        TrainingService(pool, adapters, config.engine.decode_stall_ms / 1000),
        MemoryControls(shared.process, shared.wired, shared.gpu),
        BatchService(Path(config.server.batches or home / "batches")),
        StoredResponses(),
        metrics,
        history,
        audit,
        savings,
        _recent_lines(),
        settings,
        limits,
    )


def _show_counts(
    shared: Shared, pool: ResidentPool[ServedModel], caches: CacheService
) -> None:
    """Have /metrics show what is counted elsewhere."""
    metrics, download = shared.metrics, shared.download
    metrics.add_counts("mlx_cache_", caches.counters)
    metrics.add_counts("mlx_pool_cache_", lambda: pool.lease_counts)
    metrics.add_counts("mlx_download_", lambda: {"bytes": download.arrived_bytes})
    metrics.add_model_source(lambda: {e.id: e.state for e in pool.entries()})
    metrics.kv_bytes.set_function(lambda: shared.stored.num_bytes)
    metrics.active_bytes.set_function(lambda: shared.process.active_bytes)
    metrics.peak_bytes.set_function(lambda: shared.process.peak_bytes)
    metrics.live_buffers.set_function(lambda: shared.process.live_buffers)


def _audit_store(config: Config) -> AuditStore | None:
    log = config.log
    if not log.audit:
        return None
    return AuditStore(
        Path(log.audit_file) if log.audit_file else config.disk.home / "sidecar.db",
        log.audit_days,
        log.audit_mb * 1_000_000,
        60 * log.audit_minutes,
    )


def _recent_lines() -> RecentLines:
    lines = RecentLines()
    logging.getLogger("sidecar").addHandler(lines)
    return lines


def read_catalog(config: Config) -> Catalog:
    """
    What can be served now: looked for anew at each call.

    Raises:
        ConfigError: the settings of single models cannot be used.
    """
    wishes = read_settings(settings_file(config))
    model = with_default_model(config).model
    engine = config.engine
    has_drafts = engine.speculation == "draft"
    return find_catalog(model, wishes.models, engine.max_kv_size, has_drafts=has_drafts)


def open_image_intake(config: ImageConfig) -> "ImageIntake":
    """What all models share to take images; none may need it."""
    from sidecar.images.fetch import FetchLimits
    from sidecar.images.reader import ImageIntake, ImageLimits

    image_bytes = config.max_mb << 20
    fetch = FetchLimits(image_bytes, config.url_cache_s, config.allow_private_urls)
    limits = ImageLimits(image_bytes, config.max_pixels, config.max_images, fetch)
    return ImageIntake(limits)


def _build_shared(
    config: Config, tell: Callable[[str], None], extra_processors: ExtraProcessors
) -> Shared:
    check_draft_settings(config)
    cache, gpu, rules = config.cache, gpu_thread(), configured_rules(config)
    gpu.call(lambda: prepare_device(config))
    released = Released(
        release_delay(config.device),
        gpu.call(much_kept),
        is_patient=gpu.call(has_memory_of_its_own),
    )
    stored = KVBudget(kv_limits(cache, gpu), released)
    wired = gpu.call(lambda: WiredMemory(config.device.wired_limit))
    return Shared(
        gpu,
        gpu.call(
            lambda: ProcessMemory(process_limit(config.engine), stored, buffer_limit())
        ),
        wired,
        Admission(config.engine),
        stored,
        KeptMemories(),
        Tombstones(),
        Metrics(),
        DownloadProgress(tell),
        rules,
        ProvedModels(config.disk.home / "proved-models.json"),
        CapabilityRecords(config.disk.home / "capabilities.json"),
        extra_processors,
        open_root(config),
        functools.cache(lambda: open_image_intake(config.images)),
    )


def open_root(config: Config) -> KVDisk | None:
    """Where KV outlives the process; None: it does not."""
    disk = config.disk
    if not disk.is_on:
        if DiskRoot(disk.root, DiskLimits(0, 0, 0, 0)).folders():
            logger.warning(
                "KV of earlier runs lies in %s and is not used; nobody deletes it but "
                "`mlx-sidecar kv forget`",
                disk.root,
            )
        return None
    limits = DiskLimits(
        int(disk.max_gb * _GB),
        int(disk.min_free_gb * _GB),
        int(disk.day_gb * _GB),
        disk.ttl_hours * 3600,
    )
    restore = cast("Literal['auto', 'always', 'never']", disk.restore)
    settings = DiskSettings(disk.min_tokens, disk.run_tokens, disk.quiet_s, restore)
    found = KVDisk(DiskRoot(disk.root, limits), settings)
    try:
        found.root.prepare()
        use_secret(found.secret())
    except OSError as error:
        logger.warning("KV is not kept on the disk: %s", error)
        found.is_usable = False
        return found
    found.start()
    return found


def _longest_step_s(config: Config) -> float:
    """A single step this long is no work any more: 60 s past the watchdog."""
    return (config.engine.watchdog_s or math.inf) + 60.0


def prepare_device(config: Config) -> None:
    """Set MLX up for serving; GPU thread only."""
    mx.set_memory_limit(process_limit(config.engine))
    mx.set_cache_limit(int(config.engine.max_cache_gb * (1 << 30)))


def serve_in_thread(app: App) -> threading.Thread:
    """Serve on a thread of its own, for a process that has other things to do."""
    thread = threading.Thread(target=app.serve, name="listener", daemon=True)
    thread.start()
    return thread
