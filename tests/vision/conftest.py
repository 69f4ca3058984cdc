"""Folders of tiny models that see, made once for all tests here."""

from pathlib import Path

import pytest

from testkit.tiny_models import make_model
from testkit.tiny_vision import (
    BIDIRECTIONAL,
    SEEING,
    make_bidirectional,
    make_seeing,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seeing")
    for kind in SEEING:
        make_seeing(root / kind, kind)
    make_bidirectional(root / BIDIRECTIONAL)
    make_model(root / "blind", "dense")
    return root
