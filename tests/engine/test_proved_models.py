"""What a machine knows of a model from before, and how it is doubted."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.engine.memory_model import MemoryModel, TowerCost
from sidecar.engine.selftest.proved_models import ProvedModel, ProvedModels
from testkit import planted
from testkit.jobs import leased_engine, random_ids, run
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
ONE = ProvedModel(
    MemoryModel(10.0, 2.5, 0.5), 0.01, TowerCost(1, 2, 3, 4), ("restore",)
)
_WAIT_S = 120.0


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    """In another process, which only has the file."""
    ProvedModels(tmp_path / "p.json").keep("a", ONE)
    known = ProvedModels(tmp_path / "p.json")
    assert known.find("a") == ONE
    assert known.find("b") is None
    known.drop("a")
    assert ProvedModels(tmp_path / "p.json").find("a") is None


ODD = {"memory": {"x": 1}, "token_s": 1, "tower": None, "passed": []}
WRONG = {
    "memory": {"kv_per_token": 1, "per_token": "8567", "per_pair": 1},
    "token_s": 0.1,
    "tower": None,
    "passed": [],
}
NEGATIVE = {**WRONG, "memory": {"kv_per_token": 1, "per_token": 1, "per_pair": -1}}
NAN = {**WRONG, "memory": {"kv_per_token": 1, "per_token": 1, "per_pair": math.nan}}
NO_RECORDS = [
    json.dumps({"a": WRONG}),
    json.dumps({"a": NEGATIVE}),
    json.dumps({"a": NAN}),
    "",
    "{",
    "[]",
    '{"a": 3}',
    '{"a": {}}',
    json.dumps({"a": ODD}),
]


@pytest.mark.parametrize("text", NO_RECORDS)
def test_a_file_that_is_no_record_is_no_matter(text: str, tmp_path: Path) -> None:
    """It is measured and proved anew, and written over."""
    (tmp_path / "p.json").write_text(text)
    known = ProvedModels(tmp_path / "p.json")
    assert known.find("a") is None
    known.keep("a", ONE)
    assert known.find("a") == ONE


def settings_of(model: Path, home: Path) -> dict[str, str]:
    """As people start it, with a home of its own."""
    return {
        "MODEL_PATH": str(model),
        "CACHE_SELFTEST": "background",
        "MLX_CACHE_HOME": str(home),
    }


def wait_proved(app: App) -> dict[str, str]:
    """The outcomes, once none is pending."""
    with leased_engine(app) as engine:
        deadline = time.monotonic() + _WAIT_S
        while "pending" in engine.selftest.values():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return dict(engine.selftest)


def test_a_model_that_was_proved_is_measured_and_proved_no_more(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """All ways may be used from the start; one is tried again."""
    settings = settings_of(model_folder("dense"), tmp_path)
    with running_sidecar(settings) as app:
        first = wait_proved(app)
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        assert dict(engine.selftest) == first
        assert engine.store.may_restore
        ids = random_ids(1, 60)
        run(engine, ids, 4)
        assert run(engine, ids, 4).cached > 0


def test_a_remembered_way_that_fails_is_used_no_more(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all that was remembered is proved anew."""
    settings = settings_of(model_folder("dense"), tmp_path)
    with running_sidecar(settings) as app:
        assert set(wait_proved(app).values()) == {"ok"}
    monkeypatch.setattr("random.choice", lambda names: "restore")
    with planted.shifted_layer(), running_sidecar(settings) as app:
        outcomes = wait_proved(app)
        deadline = time.monotonic() + _WAIT_S
        while outcomes["restore"] == "ok":
            assert time.monotonic() < deadline
            time.sleep(0.02)
            outcomes = wait_proved(app)
        assert outcomes["restore"] == "failed"
        with leased_engine(app) as engine:
            assert not engine.store.may_restore
            first, second = (run(engine, random_ids(2, 60), 4) for _ in range(2))
        assert second.cached == 0
        assert second.choices[0].ids == first.choices[0].ids


def test_nothing_is_reused_before_it_is_proved(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has not rested yet computes all anew."""
    monkeypatch.setattr(
        "sidecar.engine.selftest.self_test.Proof.has_work", lambda self: False
    )
    settings = settings_of(model_folder("dense"), tmp_path)
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        ids = random_ids(3, 60)
        assert [run(engine, ids, 4).cached for _ in range(2)] == [0, 0]
        assert engine.selftest["restore"] == "pending"
