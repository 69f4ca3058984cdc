"""Has a model loaded by the class that its kind's row names (residents/detection)."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from sidecar.config.settings import Config
from sidecar.core.errors import ModelLoadFailed
from sidecar.residents.detection import TEXT_KINDS, loader_of
from sidecar.residents.model_state import ModelSpec, ServedModel, Tell
from sidecar.residents.shared import Shared

Load = Callable[[ModelSpec, Tell], ServedModel]


def loader(config: Config, shared: Shared) -> Load:
    """Makes a resident of an offer, by its kind; tells its steps."""

    @functools.cache
    def made(place: str) -> Any:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(module), name)(config, shared)

    def load(spec: ModelSpec, tell: Tell) -> ServedModel:
        place = loader_of(spec.kind)
        if place is None:
            message = f"model {spec.id} cannot be loaded: {spec.kind} is not served"
            raise ModelLoadFailed(message)
        if spec.adapter_path and spec.kind not in TEXT_KINDS:
            raise ModelLoadFailed(
                f"the adapter_path of {spec.id} has no use: it is a model of kind "
                f"{spec.kind}, and those that write text take adapters"
            )
        resident: ServedModel = made(place).load(spec, tell)
        return resident

    return load
