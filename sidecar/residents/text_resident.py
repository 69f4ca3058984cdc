"""
How a text model becomes a resident: read on the load thread, then proved in turns.

Everything that takes long is cut, so that the streams of other models go on: weights
are read by a thread of their own, and each first computation is one turn of the GPU
thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sidecar.config.settings import CacheConfig, Config
from sidecar.engine.batch_loop import BatchLoop, ExtraProcessors
from sidecar.engine.download_progress import DownloadProgress
from sidecar.engine.gpu_thread import GpuThread, load_thread
from sidecar.engine.loader import (
    LoadedModel,
    finish,
    kv_quantization,
    read_model,
    run_to_end,
)
from sidecar.engine.memory_model import MemoryGuard, fit_memory
from sidecar.engine.model_place import ModelSource
from sidecar.engine.model_source import find_model
from sidecar.engine.process_memory import Admission, ProcessMemory
from sidecar.engine.self_test import LOAD_S, SelfTest, prove
from sidecar.engine.text import TextEngine
from sidecar.engine.warm_up import warm_up
from sidecar.infra.metrics import Metrics
from sidecar.kv.kv_budget import KVBudget
from sidecar.kv.prefix_store import PrefixStore
from sidecar.memory.conversation_memory import ConversationMemory, MemoryLimits
from sidecar.pipeline.prepare import Pipeline, PipelineSettings
from sidecar.residents.kept_memories import Kept, KeptMemories
from sidecar.residents.model_entry import Offer
from sidecar.residents.resident import Resident
from sidecar.volatile.rules import RuleSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """
    What all models of a process share.

    Args:
        kept: of models that are not loaded.
        rules: of volatile values. extra_processors: the test harness's.
    """

    gpu: GpuThread
    process: ProcessMemory
    admission: Admission
    stored: KVBudget
    kept: KeptMemories
    metrics: Metrics
    download: DownloadProgress
    rules: RuleSet
    extra_processors: ExtraProcessors


class TextLoader:
    """Makes residents of text models; `load` on any thread but the GPU's."""

    def __init__(self, config: Config, shared: Shared) -> None:
        self._config = config
        self._shared = shared

    def load(self, offer: Offer, tell: Callable[[str], None]) -> Resident:
        """
        Find, read and prove a model.

        Args:
            tell: takes the name of each step as it begins.
        Raises:
            ModelLoadFailed: with the reason.
        """
        shared, started = self._shared, time.monotonic()
        tell("download_progress")
        source = self._find(offer)
        tell("weights_loading")
        model = self._read(source, offer)
        shared.gpu.call(shared.process.sample)  # which sees the weights from here on
        tell("adapter_init")
        kept = self._memory_of(model)
        engine: TextEngine | None = None
        try:
            engine = self._engine_of(model, kept.store)
            tell("warm_up")
            shared.gpu.call_in_steps(warm_up(model))
            engine.check_splitter()
            tell("selftest")
            if self._config.cache.selftest == "on_load":
                shared.gpu.call_in_steps(
                    prove(engine, SelfTest(model), LOAD_S, kept.tested)
                )
            resident = self._resident_of(engine, kept, model)
            shared.gpu.call(shared.process.sample)
        except BaseException:
            self._give_up(model, engine, kept)
            raise
        shared.metrics.model_load_s.observe(time.monotonic() - started)
        shared.metrics.model_bytes.labels(model.name).set(model.num_bytes)
        logger.info("ready to reuse %s", resident.start_line())
        return resident

    def _find(self, offer: Offer) -> ModelSource:
        limit_bytes = self._shared.process.limit_bytes
        source = find_model(offer.place, self._shared.download, limit_bytes)
        # A snapshot's folder is named after a commit: the name is the offer's.
        is_found = offer.place is not None and Path(offer.place).is_absolute()
        name = offer.id.removeprefix("openai/") if is_found else source.name
        return ModelSource(name, source.folder)

    def _read(self, source: ModelSource, offer: Offer) -> LoadedModel:
        config, gpu = self._config, self._shared.gpu
        family = offer.family or config.model.family
        steps = read_model(source, family, trust=config.model.trust_remote_code)
        if config.model.load_thread == "gpu":
            model = gpu.call_in_steps(steps)
        else:
            model = load_thread().call(lambda: run_to_end(steps))
        try:
            return gpu.call_in_steps(finish(model, kv_quantization(config.cache)))
        except BaseException:
            gpu.call(model.release)
            raise

    def _engine_of(self, model: LoadedModel, store: PrefixStore) -> TextEngine:
        config, shared = self._config.engine, self._shared
        fitted, rate_s = shared.gpu.call_in_steps(
            fit_memory(model, config.prefill_step_size)
        )
        guard = MemoryGuard(fitted, shared.process)
        loop = BatchLoop(
            model, store, config, guard, shared.admission, rate_s,
            shared.extra_processors,
        )  # fmt: skip
        return TextEngine(model, loop, store, shared.gpu, config)

    def _memory_of(self, model: LoadedModel) -> Kept:
        """What this model's conversations left, or room for what they will."""
        cache, shared = self._config.cache, self._shared

        def make() -> Kept:
            store = PrefixStore(shared.stored, model.new_cache, model.quantization)
            store.verify = cache.verify
            memory = ConversationMemory(
                store, lambda: shared.gpu.call(store.clear), model.tokenizer.decode,
                model.key, memory_limits(cache),
            )  # fmt: skip
            return Kept(store, memory)

        kept = shared.kept.lend(model.key, make)
        kept.store.attach(model.new_cache)
        kept.memory.attach(model.tokenizer.decode)
        return kept

    def _resident_of(
        self, engine: TextEngine, kept: Kept, model: LoadedModel
    ) -> Resident:
        def leave() -> None:
            self._shared.gpu.call(self._shared.process.sample)
            self._shared.metrics.model_bytes.remove(model.name)
            if self._config.model.unload_keeps_kv:
                self._shared.kept.keep(model.key, kept, dict(engine.selftest))
            else:
                self._shared.kept.drop(kept)

        pipeline = build_pipeline(self._config, model, self._shared.rules, kept.memory)
        shares_kv = self._config.cache.share_between_keys
        return Resident(engine, pipeline, kept.memory, shares_kv, leave)

    def _give_up(
        self, model: LoadedModel, engine: TextEngine | None, kept: Kept
    ) -> None:
        """A load that failed leaves the memory as it was before."""
        if engine is not None:
            engine.close()
        else:
            self._shared.gpu.call(model.release)
        self._shared.kept.keep(model.key, kept, kept.tested)


def memory_limits(cache: CacheConfig) -> MemoryLimits:
    """How much of a model's conversations is kept, as the settings say."""
    return MemoryLimits(
        record_ttl_s=cache.ttl_s,
        session_idle_s=cache.session_idle_s,
        healing_entries=cache.healing_entries,
        healing_bytes=cache.healing_bytes,
        use_block_index=cache.use_block_index,
    )


def build_pipeline(
    config: Config, model: LoadedModel, rules: RuleSet, memory: ConversationMemory
) -> Pipeline:
    """The prompt side of a model."""
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
