"""
How a text model becomes a resident: read on the load thread, then proved in turns.

Everything that takes long is cut, so that the streams of other models go on: weights
are read by a thread of their own, and each first computation is one turn of the GPU
thread.
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.config.settings import CacheConfig, Config
from sidecar.core.conversation import ForgetFilter
from sidecar.core.errors import BadRequest, ModelLoadFailed
from sidecar.core.format_bytes import format_bytes
from sidecar.engine.adapters.adapter_files import CONFIG, WEIGHTS, adapter_in
from sidecar.engine.gpu_thread import load_thread
from sidecar.engine.loading.applied_adapter import (
    applied,
    is_for_a_model,
    own_folder,
    why_not,
)
from sidecar.engine.loading.checkpoint_files import memory_limit, read_config
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import (
    BLIND_HERE,
    finish,
    kv_quantization,
    read_model,
    run_to_end,
)
from sidecar.engine.loading.model_identity import files_digest
from sidecar.engine.loading.model_place import ModelSource
from sidecar.engine.loading.model_source import find_model
from sidecar.engine.memory_fit import fit_memory
from sidecar.engine.memory_model import MemoryGuard, TowerCost
from sidecar.engine.scheduler import BatchScheduler
from sidecar.engine.selftest.proved_models import ProvedModel, key_of
from sidecar.engine.selftest.self_test import LOAD_S, ProofPlan, SelfTest, prove
from sidecar.engine.selftest.tower_cost import fit_tower
from sidecar.engine.selftest.warm_up import warm_up
from sidecar.engine.text_engine import TextEngine
from sidecar.engine.vision.vision_encoder import FeatureMemo
from sidecar.kv.cache import KVCache
from sidecar.kv.prefix_store import PrefixStore
from sidecar.memory.conversation_memory import ConversationMemory, MemoryLimits
from sidecar.memory.unwritten_turns import UnwrittenTurns
from sidecar.output.grammars.call_grammar import can_hold_calls
from sidecar.output.written_calls import writer_of
from sidecar.pipeline.prepare import Pipeline, PipelineSettings
from sidecar.residents.detection import can_see, is_library_there, sees
from sidecar.residents.disk import open_disk
from sidecar.residents.draft_models import find_draft, with_draft
from sidecar.residents.kept_memories import KeptModel
from sidecar.residents.model_state import ModelSpec, Tell
from sidecar.residents.ocr import ocr_prompt
from sidecar.residents.resident import Resident
from sidecar.residents.shared import Shared
from sidecar.volatile.rules import RuleSet

if TYPE_CHECKING:  # of the extra `vision`
    from sidecar.images.reader import ImageReader

logger = logging.getLogger(__name__)


class TextLoader:
    """Makes residents of text models; `load` on any thread but the GPU's."""

    def __init__(self, config: Config, shared: Shared) -> None:
        self._config = config
        self._shared = shared

    def load(self, spec: ModelSpec, tell: Tell) -> Resident:
        """
        Find, read and prove a model.

        Args:
            tell: takes the name of each step as it begins, and bytes as they are read.
        Raises:
            ModelLoadFailed: with the reason.
        """
        shared, started = self._shared, time.monotonic()
        own = _adapter_folder(spec)
        tell("download_progress")
        source = self._find(spec)
        tell("weights_loading")
        draft = find_draft(spec, self._config, shared)
        model = self._read(source, spec, tell)
        if own is not None and is_for_a_model(own):
            model, own = self._applied(model, own, spec), None
        if draft is not None:
            model = with_draft(model, draft, spec, self._config, shared.gpu)
        shared.gpu.call(shared.process.sample)  # which sees the weights from here on
        tell("adapter_init")
        kept = self._memory_of(model)
        engine: TextEngine | None = None
        try:
            is_remembered = self._config.cache.selftest == "background"
            key = self._key(model) if is_remembered else ""
            known = self._known(key) or self._measured(model)
            engine = self._engine_of(model, kept.store, known)
            engine.check_splitter()
            tell("selftest")
            self._prove(engine, kept, known, key)
            _try_adapter(engine, own, spec)
            resident = self._resident_of(engine, kept, model, own, spec)
            shared.gpu.call(shared.process.sample)
            shared.gpu.call(shared.process.count_buffers)
        except BaseException:
            self._give_up(model, engine, kept)
            raise
        shared.note_loaded(model.name, model.all_bytes, started)
        logger.info("ready to reuse %s", resident.start_line())
        return resident

    def _find(self, spec: ModelSpec) -> ModelSource:
        maximum = self._config.engine.max_model_bytes
        limit = memory_limit(self._shared.process.limit_bytes, maximum)
        source = find_model(spec.place, self._shared.download, limit)
        # A snapshot's folder is named after a commit: the name is the offer's.
        is_found = spec.place is not None and Path(spec.place).is_absolute()
        name = spec.id.removeprefix("openai/") if is_found else source.name
        return ModelSource(name, source.folder)

    def _read(self, source: ModelSource, spec: ModelSpec, tell: Tell) -> LoadedModel:
        memo = self._memo(source.folder)
        if memo is None:
            return self._read_as(source, spec, None, tell)
        try:
            return self._read_as(source, spec, memo, tell)
        except ModelLoadFailed as error:
            # mlx-vlm may fail at an architecture whose text mlx-lm computes.
            logger.warning("read for its text alone: %s", error.message)
            model = self._read_as(source, spec, None, tell)
            why = error.message.rpartition(": ")[2]
            return replace(model, no_vision_reason=f"{BLIND_HERE}: {why}")

    def _applied(
        self, model: LoadedModel, folder: Path, spec: ModelSpec
    ) -> LoadedModel:
        """The model with an adapter as part of it."""
        gpu, process = self._shared.gpu, self._shared.process
        process.count_anew(gpu)
        needed = (folder / WEIGHTS).stat().st_size
        if needed > process.free_bytes:
            gpu.call(model.release)
            left = format_bytes(process.free_bytes)
            why = f"it needs {format_bytes(needed)}, and {left} are left"
            raise _no_adapter(spec, why)
        try:
            return gpu.call(lambda: applied(model, folder))
        except Exception as error:  # noqa: BLE001 - whatever a library raises
            why = _said_by(error, folder)
        gpu.call(model.release)
        raise _no_adapter(spec, why)  # not within: it would keep the model

    def _read_as(
        self,
        source: ModelSource,
        spec: ModelSpec,
        memo: FeatureMemo | None,
        tell: Tell,
    ) -> LoadedModel:
        config, gpu = self._config, self._shared.gpu
        family = spec.syntax.family or config.model.family
        parser = spec.syntax.tool_parser or self._probed_parser(source, spec)
        syntax = replace(spec.syntax, family=family, tool_parser=parser)
        trust = config.model.trust_remote_code
        tell_bytes = functools.partial(tell, "weights_loading")
        steps = read_model(source, syntax, trust=trust, memo=memo, tell=tell_bytes)
        if config.model.load_thread == "gpu":
            model = gpu.call_in_steps(steps)
        else:
            model = load_thread().call(lambda: run_to_end(steps))
        if not is_library_there():
            model = replace(model, no_vision_reason=_no_vision_reason(source.folder))
        try:
            return gpu.call_in_steps(finish(model, kv_quantization(config.cache)))
        except BaseException:
            gpu.call(model.release)
            raise

    def _probed_parser(self, source: ModelSource, spec: ModelSpec) -> str | None:
        """How its calls are read, where only its probe found that out."""
        known = self._shared.capabilities
        if known.find(spec.id) is None:
            return None  # no file is read for it
        files = files_digest(source.folder, _adapter_path(spec))
        known.check(spec.id, files)
        return known.tool_parser(spec.id, files)

    def _memo(self, folder: Path) -> FeatureMemo | None:
        """Room for what its vision tower gives, if it has one that can be run."""
        if not can_see(folder, read_config(folder) or {}):
            return None
        return FeatureMemo(self._config.images.feature_cache_mb << 20)

    def _images_of(
        self, model: LoadedModel, memory: ConversationMemory
    ) -> "ImageReader | None":
        if model.vision_encoder is None:
            return None
        from sidecar.images.reader import ImageReader

        reader = ImageReader(
            self._shared.image_intake(), model.vision_encoder.processor
        )
        for forget in (reader.forget, model.vision_encoder.memo.forget):
            memory.also_forget(forget)
        return reader

    def _known(self, key: str) -> ProvedModel | None:
        """What was measured and proved of a model on this machine before."""
        return self._shared.proved.find(key) if key else None

    def _key(self, model: LoadedModel) -> str:
        return key_of(model, self._config.engine.prefill_step_size)

    def _measured(self, model: LoadedModel) -> ProvedModel:
        """What its prompts and images take, tried on the device."""
        step_size = self._config.engine.prefill_step_size
        fitted = self._shared.gpu.call_in_steps(fit_memory(model, step_size))
        return ProvedModel(*fitted, self._tower_of(model))

    def _engine_of(
        self, model: LoadedModel, store: PrefixStore, known: ProvedModel
    ) -> TextEngine:
        config, shared = self._config.engine, self._shared
        guard = MemoryGuard(known.memory, shared.process, known.tower)
        shared.gpu.call(lambda: model.max_rows_ahead)  # it describes steps to find out
        loop = BatchScheduler(
            model,
            store,
            config,
            guard,
            shared.admission,
            known.token_s,
            shared.extra_processors,
        )
        return TextEngine(model, loop, store, shared.gpu, config)

    def _prove(
        self, engine: TextEngine, kept: KeptModel, known: ProvedModel, key: str
    ) -> None:
        """Have each way of reuse tried, and every kernel used once."""
        shared, model, when = self._shared, engine.model, self._config.cache.selftest
        if kept.tested.get("ahead") == "failed":  # maybe while it was used, untested
            engine.selftest["ahead"] = "failed"
            shared.gpu.call(lambda: engine.allow("ahead", is_allowed=False))
        test = SelfTest(model)
        if shared.disk is None or not shared.disk.is_usable:
            test.skip("disk")
        if self._config.engine.speculation == "off":
            test.skip("verify")
        if when == "background":

            def note(passed: Sequence[str]) -> None:
                shared.proved.keep(key, replace(known, passed=passed))

            plan = ProofPlan(0.0, kept.tested, known.passed, warm_up(model), note)
            shared.gpu.call_in_steps(prove(engine, test, plan))
            return
        shared.gpu.call_in_steps(warm_up(model))
        if when == "on_load":
            plan = ProofPlan(LOAD_S, kept.tested)
            shared.gpu.call_in_steps(prove(engine, test, plan))

    def _tower_of(self, model: LoadedModel) -> TowerCost | None:
        """What its images take; None: it takes none, as its self-test will find."""
        if model.vision_encoder is None:
            return None
        try:
            return self._shared.gpu.call_in_steps(fit_tower(model.vision_encoder))
        except Exception as error:  # noqa: BLE001 - whatever an architecture raises
            logger.warning("its images could not be measured: %r", error)
            return None

    def _memory_of(self, model: LoadedModel) -> KeptModel:
        """What this model's conversations left, or room for what they will."""
        cache, shared = self._config.cache, self._shared

        def make() -> KeptModel:
            store = PrefixStore(shared.stored, model.new_cache, model.quantization)
            store.verify = cache.verify

            def clear(forget_filter: ForgetFilter | None) -> int:
                freed = store.forget(forget_filter)
                shared.process.sample()  # what is shown must not be of before
                return freed

            memory = ConversationMemory(
                store,
                lambda forget_filter: shared.gpu.call(lambda: clear(forget_filter)),
                model.tokenizer.decode,
                f"{model.key} {shared.rules.digest}",
                memory_limits(cache),
                UnwrittenTurns() if shared.disk and shared.disk.is_usable else None,
                shared.tombstones,
            )
            return KeptModel(store, memory)

        kept = shared.kept.borrow(model.key, make)
        kept.store.attach(model.new_cache)
        kept.store.whole_images = bool(
            model.vision_encoder and not model.vision_encoder.is_causal
        )
        kept.memory.reopen(model.tokenizer.decode)
        return kept

    def _resident_of(
        self,
        engine: TextEngine,
        kept: KeptModel,
        model: LoadedModel,
        adapter_folder: Path | None,
        spec: ModelSpec,
    ) -> Resident:
        def leave() -> None:
            if model.vision_encoder is not None:
                model.vision_encoder.memo.forget()
            self._shared.note_left(model.name)
            if self._config.model.unload_keeps_kv:
                self._shared.kept.keep(model.key, kept, engine.outcomes)
            else:
                self._shared.kept.drop(kept)

        cache = KVCache(kept.store, open_disk(self._shared, engine, kept))
        try:
            pipeline = build_pipeline(
                self._config, model, self._shared.rules, kept, cache
            )
        except BaseException:
            if cache.disk is not None:
                cache.disk.close()
            raise
        return Resident(
            engine,
            pipeline,
            kept.memory,
            cache,
            self._config.cache.share_between_keys,
            leave,
            self._images_of(model, kept.memory),
            self._config.images.unsupported,
            ocr_prompt(read_config(model.folder) or {}),
            adapter_folder,
            functools.partial(files_digest, model.folder, _adapter_path(spec)),
        )

    def _give_up(
        self, model: LoadedModel, engine: TextEngine | None, kept: KeptModel
    ) -> None:
        """A load that failed leaves the memory as it was before."""
        if engine is not None:
            engine.close()
        else:
            self._shared.gpu.call(model.release)
        self._shared.kept.keep(model.key, kept, kept.tested)


def _adapter_path(spec: ModelSpec) -> Path | None:
    return own_folder(spec.adapter_path) if spec.adapter_path else None


def _adapter_folder(spec: ModelSpec) -> Path | None:
    """
    Where the adapter is that a model is read with; None: nowhere.

    Raises:
        ModelLoadFailed: it cannot be served.
    """
    folder = _adapter_path(spec)
    if folder is not None and (why := why_not(folder)):
        raise _no_adapter(spec, why)
    return folder


def _try_adapter(engine: TextEngine, folder: Path | None, spec: ModelSpec) -> None:
    """
    Have the model's own adapter in the bank before the first request needs it.

    Raises:
        ModelLoadFailed: it cannot be served.
    """
    if folder is None:
        return
    try:
        with engine.adapters.leased(adapter_in(folder)):
            return
    except BadRequest as error:
        why = error.message
    raise _no_adapter(spec, why)  # not within: it would keep the model


def _said_by(error: Exception, folder: Path) -> str:
    """What a library says of an adapter, without a path of this machine."""
    if isinstance(error, KeyError):
        return f"{CONFIG} lacks {error}"
    return str(error).replace(str(folder), folder.name)[:300]


def _no_adapter(spec: ModelSpec, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"the adapter_path of {spec.id} cannot be used: {why}")


def _no_vision_reason(folder: Path) -> str:
    """Why a model that was made to see does not."""
    if not sees(folder, read_config(folder) or {}):
        return ""
    return (
        "this model takes text only until litellm-mlx[vision] is installed "
        "(install_and_run.py --full)"
    )


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
    config: Config, model: LoadedModel, rules: RuleSet, kept: KeptModel, kv: KVCache
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
        media_tokens=model.vision_encoder.processor.media_tokens
        if model.vision_encoder
        else frozenset(),
        holds_calls=can_hold_calls(model.syntax.calls[0]),
        write_call=writer_of(model.syntax.calls),
        keeps_from_calls=bool(model.syntax.opener_ids),
        omits_written=config.generation.omit_written,
    )
    think_open = model.syntax.markers.think_open
    return Pipeline(
        model.tokenizer, think_open, rules, settings, kept.memory, kv.lookup
    )
