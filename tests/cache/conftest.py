"""Tiny models in memory, loaded once."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loader import LoadedModel, load
from sidecar.engine.model_source import find_model

TinyModel = Callable[[str], LoadedModel]


@pytest.fixture(scope="session")
def tiny_model(model_folder: Callable[[str], Path]) -> TinyModel:
    """A loaded model by its kind: `dense`, `hybrid`, `sliding`."""

    @functools.cache
    def loaded(kind: str) -> LoadedModel:
        source = find_model(str(model_folder(kind)))
        return gpu_thread().call(lambda: load(source, None, trust=False))

    return loaded
