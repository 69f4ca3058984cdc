"""Tiny model folders and one sidecar on the built-in model, for the whole session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from sidecar.app import App
from tests.support.servers import running_sidecar
from tests.support.tiny_models import make_model

# Reproducible runs; MLX and a busy machine make single examples slow.
hypothesis.settings.register_profile("repo", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repo")

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The folder of a tiny random model: `dense`, `hybrid` or `sliding`."""
    root = tmp_path_factory.mktemp("models")
    return lambda kind: make_model(root / kind, kind)


@pytest.fixture(scope="session")
def app() -> Iterator[App]:
    """A sidecar that serves the built-in model."""
    with running_sidecar() as running:
        yield running
