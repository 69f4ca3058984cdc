"""The warm-up goes through everything that a request may ask of the decode batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loader import run_to_end
from sidecar.engine.selftest import warm_up
from tests.engine.test_self_test import loaded

ModelFolder = Callable[[str], Path]


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_all_kinds_of_sampling_are_used(kind: str, model_folder: ModelFolder) -> None:
    """One row a kind, beside each other, with log-probabilities, to their ends."""

    def said() -> int:
        model = loaded(model_folder(kind))
        return run_to_end(warm_up.decode_in_every_way(model))

    number = gpu_thread().call(said)
    assert number == len(warm_up._KINDS) * warm_up._NUM_TOKENS


def test_the_cpu_has_nothing_to_warm_up(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are there; another device's are not."""
    seen: list[object] = []

    def note(model: object) -> Iterator[None]:
        seen.append(model)
        yield

    monkeypatch.setattr(warm_up, "decode_in_every_way", note)
    model = gpu_thread().call(lambda: loaded(model_folder("dense")))
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    run_to_end(warm_up.warm_up(model))
    assert seen == []
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    run_to_end(warm_up.warm_up(model))
    assert seen == [model]


def test_a_model_that_cannot_be_batched_is_loaded_all_the_same(
    model_folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a GPU its load failed: rows of it run alone, as the self-test finds out."""
    model = gpu_thread().call(lambda: loaded(model_folder("capped")))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    gpu_thread().call(lambda: run_to_end(warm_up.warm_up(model)))
    assert "warm-up ended early" in caplog.text
