"""The self-test: silent on a sound model, loud on each planted fault."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import load, run_to_end
from sidecar.engine.loading.model_source import find_model
from sidecar.engine.selftest import runs
from sidecar.engine.selftest.self_test import PathResult, SelfTest, run_selftest
from testkit import planted

ModelFolder = Callable[[str], Path]
_KINDS = ("dense", "hybrid", "sliding")
_DTYPES = (mx.float32, mx.bfloat16)


def loaded(folder: Path, dtype: Any = mx.float32, scale: float = 1.0) -> LoadedModel:
    """A model in that number format, its logits that many times as large."""
    model = load(find_model(str(folder)), trust=False)
    inner = model.model
    for name, module in inner.named_modules():
        if name.endswith("lm_head"):
            module.weight = module.weight * scale
    inner.set_dtype(dtype)
    mx.eval(inner.parameters())
    return model


def results_of(folder: Path, dtype: Any, scale: float = 1.0) -> dict[str, PathResult]:
    """All results by name."""

    def run() -> list[PathResult]:
        return run_selftest(loaded(folder, dtype, scale))

    return {result.name: result for result in gpu_thread().call(run)}


def failed(results: dict[str, PathResult]) -> set[str]:
    return {name for name, result in results.items() if result.outcome == "failed"}


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_sound_model_passes(kind: str, dtype: Any, model_folder: ModelFolder) -> None:
    """What is moved is equal bit for bit, in any number format."""
    results = results_of(model_folder(kind), dtype)
    assert not failed(results)
    assert {r.difference.moved for r in results.values()} == {0.0}
    assert results["batch"].difference.noise is not None


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_a_model_does_not_matter(
    scale: float, model_folder: ModelFolder
) -> None:
    """No absolute bound: one model's logits are ten times as large as another's."""
    plain = results_of(model_folder("sliding"), mx.float32)
    scaled = results_of(model_folder("sliding"), mx.float32, scale)
    assert not failed(scaled)
    one, other = (r["batch"].difference.computed for r in (plain, scaled))
    assert one == pytest.approx(other, rel=0.5, abs=1e-6)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("fault", [planted.shifted_layer, planted.foreign_block])
def test_wrong_kv_in_one_layer_is_found(
    fault: Any, kind: str, dtype: Any, model_folder: ModelFolder
) -> None:
    with fault():
        found = failed(results_of(model_folder(kind), dtype))
    assert {"restore", "lend", "trim", "branch", "checkpoint", "disk"} == found


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_rows_wrong_offset_is_found(
    kind: str, dtype: Any, model_folder: ModelFolder
) -> None:
    """Although the logits of a random model hardly notice where a token stands."""
    with planted.offset_off_by_one():
        assert failed(results_of(model_folder(kind), dtype)) == {"batch"}


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("kind", ["hybrid", "sliding"])
def test_a_stale_checkpoint_is_found(
    kind: str, dtype: Any, model_folder: ModelFolder
) -> None:
    with planted.stale_checkpoint():
        found = failed(results_of(model_folder(kind), dtype))
    assert {"trim", "branch", "checkpoint"} <= found


@pytest.mark.parametrize("kind", _KINDS)
def test_what_the_disk_gives_back_wrong_is_found(
    kind: str, model_folder: ModelFolder
) -> None:
    """All else is used."""
    with planted.shifted_slot():
        assert failed(results_of(model_folder(kind), mx.float32)) == {"disk"}


def test_a_prompt_that_is_not_restored_proves_nothing(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that always misses gives right answers, and no proof."""
    monkeypatch.setattr(runs.PrefixStore, "_usable", lambda *_arguments: 0)
    found = failed(results_of(model_folder("dense"), mx.float32))
    assert "restore" in found


def test_a_model_without_numbers_fails(model_folder: ModelFolder) -> None:
    """Not a number is near nothing."""
    found = failed(results_of(model_folder("dense"), mx.float32, float("nan")))
    assert "batch" in found


def test_results_come_one_by_one(model_folder: ModelFolder) -> None:
    """So that a slow device can spread them."""

    def run() -> tuple[list[str], str, list[str]]:
        test = SelfTest(loaded(model_folder("dense")))
        before = test.pending
        return before, run_to_end(test.advance()).name, test.pending

    before, name, after = gpu_thread().call(run)
    assert before == [name, *after]
