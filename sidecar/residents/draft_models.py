"""Loads the small model that drafts for a large one, and sees that it can."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sidecar.config.settings import Config
from sidecar.config.sources import ConfigError
from sidecar.config.values import BUILTIN
from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.loading.checkpoint_files import memory_limit
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import finish, read_model
from sidecar.engine.loading.model_place import ModelSource, early_fault
from sidecar.engine.loading.model_source import find_model
from sidecar.kv.kv_layers import is_sliceable
from sidecar.residents.model_settings import read_settings, settings_file
from sidecar.residents.model_state import ModelSpec, draft_place
from sidecar.residents.shared import Shared

logger = logging.getLogger(__name__)


def check_draft_settings(config: Config) -> None:
    """
    See that a draft model and SPECULATION go together.

    Raises:
        ConfigError: one of them is set without the other.
    """
    speculation, place = config.engine.speculation, config.model.draft_model
    if place and speculation == "auto":
        raise ConfigError(
            "DRAFT_MODEL is used with SPECULATION=draft only: set that as well"
        )
    if speculation == "draft" and not place:
        models = read_settings(settings_file(config)).models
        if not any(one.draft_model for one in models.values()):
            raise ConfigError(
                "SPECULATION=draft needs DRAFT_MODEL, a hub id or a folder, or a "
                "draft_model in the file of MODEL_SETTINGS_PATH"
            )


def draft_fault(place: str, speculation: str) -> str | None:
    """Why a model cannot be given this draft model; None: its load will say more."""
    if speculation != "draft":
        return f"it is used with SPECULATION=draft only, and SPECULATION={speculation}"
    place = os.path.expanduser(place)
    return None if place in BUILTIN else early_fault(place, None)


def find_draft(spec: ModelSpec, config: Config, shared: Shared) -> ModelSource | None:
    """
    The model that is to draft for another one; None: none is. Not on the GPU thread.

    Raises:
        ModelLoadFailed: its files are not there or cannot be used.
    """
    place = draft_place(spec, config.model.draft_model)
    if place is None or config.engine.speculation == "off":
        return None
    if config.engine.speculation != "draft":
        logger.warning(
            "model=%s has a draft_model, which SPECULATION=draft alone uses", spec.id
        )
        return None
    limit = memory_limit(shared.process.limit_bytes, config.engine.max_model_bytes)
    with _naming_the_draft(spec):
        return find_model(None if place in BUILTIN else place, shared.download, limit)


def with_draft(
    large: LoadedModel,
    source: ModelSource,
    spec: ModelSpec,
    config: Config,
    gpu: GpuThread,
) -> LoadedModel:
    """
    A model with the one that drafts for it; not on the GPU thread.

    A model that cannot have the one that is set is released.

    Raises:
        ModelLoadFailed: that one cannot be loaded, or cannot draft for it.
    """
    try:
        with _naming_the_draft(spec):
            draft = _read(source, config, gpu)
            try:
                _check(draft, large)
            except BaseException:
                gpu.call(draft.release)
                raise
    except BaseException:
        gpu.call(large.release)
        raise
    return replace(large, draft=draft)


@contextlib.contextmanager
def _naming_the_draft(spec: ModelSpec) -> Iterator[None]:
    """A fault of the small model is not taken for the large one's."""
    setting = "DRAFT_MODEL" if spec.draft_model is None else "its draft_model"
    try:
        yield
    except ModelLoadFailed as error:
        raise ModelLoadFailed(
            f"the model that drafts for {spec.id} ({setting}): {error.message}"
        ) from error


def _read(source: ModelSource, config: Config, gpu: GpuThread) -> LoadedModel:
    steps = read_model(source, trust=config.model.trust_remote_code)
    draft = gpu.call_in_steps(steps)
    try:
        return gpu.call_in_steps(finish(draft, None))
    except BaseException:
        gpu.call(draft.release)
        raise


def _check(draft: LoadedModel, large: LoadedModel) -> None:
    """
    See that a model can draft for another one.

    Raises:
        ModelLoadFailed: its tokens are others, or its KV cannot be cut back.
    """
    what = f"{draft.name} cannot draft for {large.name}: "
    own, other = _vocabulary(draft), _vocabulary(large)
    if own != other:
        differing = own.items() ^ other.items()
        text, number = min(differing, key=lambda pair: pair[1])
        raise ModelLoadFailed(
            f"{what}their vocabularies differ in {len({t for t, _ in differing})} "
            f"tokens, the first of them {text!r} ({number}); a draft_model of its own "
            'or "" in its settings leaves DRAFT_MODEL out'
        )
    if not is_sliceable(draft.new_cache()):
        raise ModelLoadFailed(f"{what}its KV cannot be cut back to an earlier token")


def _vocabulary(model: LoadedModel) -> dict[str, int]:
    found: Any = model.tokenizer.get_vocab()
    return dict(found)
