"""Random LoRA adapters of tiny models, and what mlx-lm says with one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model, quantize_model, save_model

_ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")


def make_adapter(
    out: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    keys: Sequence[str] = _ATTENTION,
    num_layers: int = -1,
    scale: float = 20.0,
    base: str | None = None,
    kind: str = "lora",
) -> Path:
    """
    Write an adapter that changes what a model says; GPU thread only.

    Args:
        kind: `lora` or `dora`.
    """
    network: Any = load_model(model)[0]
    network.freeze()
    count = num_layers if num_layers >= 0 else len(network.layers)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(keys)}
    linear_to_lora_layers(network, count, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
    trained = {
        name: mx.random.normal(array.shape) * 0.2
        for name, array in tree_flatten(network.trainable_parameters())
    }
    assert trained
    out.mkdir(parents=True)
    mx.save_safetensors(str(out / "adapters.safetensors"), trained)
    config = {
        "fine_tune_type": kind,
        "num_layers": count,
        "lora_parameters": parameters,
        "model": str(model) if base is None else base,
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def quantized(model: Path, out: Path) -> Path:
    """The same model in 4 bits; GPU thread only."""
    network, config = load_model(model)
    network, config = quantize_model(network, config, group_size=32, bits=4)
    out.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    save_model(out, network)
    (out / "config.json").write_text(json.dumps(config))
    return out


def plain_answers(
    model: Path, adapter: Path | None
) -> Callable[[Sequence[int], int], list[int]]:
    """What mlx-lm says greedily behind a prompt, cold; GPU thread only."""
    network: Any = load_model(model)[0]
    if adapter is not None:
        network = load_adapters(network, str(adapter))

    def answer(ids: Sequence[int], max_tokens: int) -> list[int]:
        steps = generate_step(mx.array(ids), network, max_tokens=max_tokens)
        return [int(token) for token, _ in steps]

    return answer
