"""What the model of a prompt's memory says, against what the prompt takes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import load, run_to_end
from sidecar.engine.loading.model_source import find_model
from sidecar.engine.memory_fit import fit_memory
from sidecar.engine.memory_model import MemoryModel
from sidecar.kv import kv_layers
from sidecar.kv.quantization import KVQuantization
from tools.tiny_checkpoints import make_text

Loaded = Callable[[str], LoadedModel]
STEP, NUM_STEPS = 256, 6
GIB = 1 << 30
ARCHITECTURES = ("qwen3", "gemma3_text", "falcon_h1", "mamba2")


@pytest.mark.parametrize("device", [mx.cpu, mx.gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_takes_what_was_foreseen(
    architecture: str,
    device: mx.DeviceType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dense, with windows, hybrid and recurrent: never more, nor much less."""
    model = loaded(make_text(tmp_path / architecture, architecture))
    monkeypatch.setattr(mx, "default_device", lambda: device)  # as it measures there
    fitted, token_s = run_to_end(fit_memory(model, STEP))
    assert token_s > 0
    shares = [actual / foreseen for actual, foreseen in prefilled(model, fitted)]
    assert max(shares) <= 1.0, shares
    assert shares[-1] >= 0.25, shares


def test_depth_costs_no_less_than_none(tiny_model: Loaded) -> None:
    """The chunks that it is measured by are as long as those before them."""
    model = tiny_model("hybrid")
    fits = [run_to_end(fit_memory(model, STEP))[0] for _ in range(3)]
    assert min(fitted.per_pair for fitted in fits) > 0


def test_quantised_kv_is_foreseen(tmp_path: Path) -> None:
    """Its attention is not fused, and what was plain is held beside it once."""
    plain = loaded(make_text(tmp_path / "qwen3", "qwen3"))
    model = replace(plain, quantization=KVQuantization(bits=8, group_size=32, start=0))
    fitted, _ = run_to_end(fit_memory(model, STEP))
    assert fitted.per_pair > 0
    assert max(a / f for a, f in prefilled(model, fitted)) <= 1.0


def test_of_many_layers_a_few_grow_at_a_time() -> None:
    """So KV that fits is not refused for a second copy that there never is."""
    of_a_token = 147_456  # 36 layers, 8 heads of 128, 16 bits
    model = MemoryModel(of_a_token, 1.7e6, 0, growing_share=8 / 36)
    held = model.kv_bytes(131_072)
    assert held + model.peak_bytes(131_072, 64) < 24 * GIB
    assert model.peak_bytes(131_072, 64) > 0.2 * held
    all_at_once = MemoryModel(of_a_token, 1.7e6, 0)
    assert all_at_once.peak_bytes(131_072, 64) > held
    small = model.kv_bytes(1000)
    assert model.peak_bytes(1000, 64) > small  # buffers that small are all in flight


def loaded(folder: Path) -> LoadedModel:
    """A model, read."""
    return load(find_model(str(folder)), trust=False)


def prefilled(model: LoadedModel, fitted: MemoryModel) -> list[tuple[int, int]]:
    """Bytes that each chunk of a prompt takes beyond what is held, and was to take."""
    cache, found = model.new_cache(), []
    for number in range(1, NUM_STEPS + 1):
        held, depth = sum(layer.nbytes for layer in cache), number * STEP
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model.forward(mx.array([[5] * STEP]), cache)
        if model.quantization:
            model.quantization.apply(cache)
        kv_layers.evaluate(cache)
        grown = fitted.kv_bytes(depth) - held
        foreseen = fitted.peak_bytes(depth, STEP) + grown
        found.append((mx.get_peak_memory() - before, foreseen))
    return found
