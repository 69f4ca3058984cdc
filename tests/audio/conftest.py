"""Tiny models of sound and one that talks, served by one sidecar a file of tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.app import App
from testkit.servers import running_sidecar
from testkit.tiny_audio import AUDIO, make_audio
from testkit.tiny_models import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("audio")
    for kind in AUDIO:
        make_audio(root / kind, kind)
    make_model(root / "talker", "dense")
    return root


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    named = {"MODEL_DIR": str(folder), "MODEL_PATH": str(folder / "talker")}
    with running_sidecar(named) as app:
        yield app
