"""Has a model loaded by the class that its kind's row names (residents/detection)."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from sidecar.config.settings import Config
from sidecar.core.errors import ModelLoadFailed
from sidecar.residents.detection import loader_of
from sidecar.residents.model_entry import Held, ModelSpec
from sidecar.residents.shared import Shared

Load = Callable[[ModelSpec, Callable[[str], None]], Held]


def loader(config: Config, shared: Shared) -> Load:
    """Makes a resident of an offer, by its kind; tells its steps."""

    @functools.cache
    def made(place: str) -> Any:
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(module), name)(config, shared)

    def load(offer: ModelSpec, tell: Callable[[str], None]) -> Held:
        place = loader_of(offer.kind)
        if place is None:
            message = f"model {offer.id} cannot be loaded: {offer.kind} is not served"
            raise ModelLoadFailed(message)
        resident: Held = made(place).load(offer, tell)
        return resident

    return load
