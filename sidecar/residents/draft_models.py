"""Loads the small model that drafts for a large one, and sees that it can."""

from dataclasses import replace
from typing import Any

from sidecar.config.settings import Config
from sidecar.config.sources import ConfigError
from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.loading.checkpoint_files import MemoryLimit, memory_limit
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import finish, read_model
from sidecar.engine.loading.model_source import find_model
from sidecar.kv.kv_layers import is_sliceable
from sidecar.residents.model_settings import read_settings, settings_file
from sidecar.residents.model_state import ModelSpec
from sidecar.residents.shared import Shared


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


def with_draft(
    large: LoadedModel, spec: ModelSpec, config: Config, shared: Shared
) -> LoadedModel:
    """
    A model with the one that drafts for it, if one is set; not on the GPU thread.

    A model that cannot have the one that is set is released.

    Raises:
        ModelLoadFailed: that one cannot be loaded, or cannot draft for it.
    """
    place = config.model.draft_model if spec.draft_model is None else spec.draft_model
    if config.engine.speculation != "draft" or not place:
        return large
    try:
        draft = _read(place, _left(config, shared, large), config, shared)
        try:
            _check(draft, large)
        except BaseException:
            shared.gpu.call(draft.release)
            raise
    except BaseException:
        shared.gpu.call(large.release)
        raise
    return replace(large, draft=draft, num_bytes=large.num_bytes + draft.num_bytes)


def _left(config: Config, shared: Shared, large: LoadedModel) -> MemoryLimit | None:
    """What the large model leaves."""
    limit = memory_limit(shared.process.limit_bytes, config.engine.max_model_bytes)
    return limit and replace(limit, num_bytes=limit.num_bytes - large.num_bytes)


def _read(
    place: str, limit: MemoryLimit | None, config: Config, shared: Shared
) -> LoadedModel:
    source, gpu = find_model(place, shared.download, limit), shared.gpu
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
    what = f"DRAFT_MODEL {draft.name} cannot draft for {large.name}: "
    own, other = _vocabulary(draft), _vocabulary(large)
    if own != other:
        differing = own.items() ^ other.items()
        text, number = min(differing, key=lambda pair: pair[1])
        raise ModelLoadFailed(
            f"{what}their vocabularies differ in {len({t for t, _ in differing})} "
            f"tokens, the first of them {text!r} ({number})"
        )
    if not is_sliceable(draft.new_cache()):
        raise ModelLoadFailed(f"{what}its KV cannot be cut back to an earlier token")


def _vocabulary(model: LoadedModel) -> dict[str, int]:
    found: Any = model.tokenizer.get_vocab()
    return dict(found)
