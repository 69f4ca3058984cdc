"""
Folders of tiny random models of any architecture, with the built-in model's tokenizer.

fp32, so that warm and cold runs can be compared exactly. What a library makes constant
(norms, biases, decays) is made random as well: a constant would hide a row or a step
that is mixed up.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from testkit.tiny_models import BUILTIN
from tools.tiny_configs import Config, text_config
from tools.tiny_processors import write_processor, write_tokenizer
from tools.tiny_seeing import build, seeing_config
from tools.tiny_seeing_overrides import PROCESSORS

_SPREAD = 0.02  # of what was constant
_MAX_BYTES = 1300 << 20


def make_text(out: Path, name: str) -> Path:
    """Write the folder of a tiny model of one of mlx-lm's architectures."""
    out.mkdir(parents=True)
    base = json.loads((BUILTIN / "config.json").read_text())
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUILTIN / file, out / file)
    config = text_config(name, base["vocab_size"])
    model_class, args_class = _get_classes(config)
    mx.random.seed(7)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    write_model(out, model, config | special_ids(base))
    return out


def make_seeing(out: Path, name: str) -> Path:
    """Write the folder of a tiny model of one of mlx-vlm's architectures."""
    out.mkdir(parents=True)
    base = json.loads((BUILTIN / "config.json").read_text())
    vocab = write_tokenizer(out, name)
    vocab_size = (max(vocab.values()) + 64) // 64 * 64
    config = seeing_config(name, vocab_size, vocab) | special_ids(base)
    mx.random.seed(7)
    write_model(out, build(config), config)
    write_processor(out, name, PROCESSORS.get(name, {}))
    return out


def special_ids(base: Config) -> Config:
    """Which tokens of the built-in tokenizer end a turn and fill."""
    return {name: base[name] for name in ("eos_token_id", "pad_token_id")}


def write_model(out: Path, model: Any, config: Config) -> None:
    """Write the weights of a model and its config."""
    arrays = tree_flatten(model.parameters())
    if (size := sum(array.nbytes for _, array in arrays)) > _MAX_BYTES:
        raise ValueError(f"{size >> 20} MiB are not tiny")
    weights = {name: _random(a) for name, a in arrays}
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False}))


def _random(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    array = array.astype(mx.float32)
    if array.size and mx.all(array == array.reshape(-1)[0]).item():
        array = array + _SPREAD * mx.random.normal(array.shape)
    return array
