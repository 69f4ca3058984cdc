"""
Random models, made without a download.

    python -m bench.models FOLDER [--small | --large]

The usual one has 52 million parameters in float32; the small one 7, for long prompts
on a CPU; the large one 8.2 billion in bfloat16, for a GPU (16.4 GB).

Tokenizer and template are the built-in model's. Output rows of the added tokens are
zero, so a greedy answer never ends by itself and has exactly `max_tokens` tokens; those
of tokens that end within a character, and of a lone space, are zero too: a stream holds
them until the next token, and shows any other at once.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

_BUILTIN = Path(__file__).parents[1] / "sidecar" / "builtin_model"
_SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 640,
    "num_hidden_layers": 10,
    "intermediate_size": 1792,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


_SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


_LARGE = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}
_SHAPES: dict[str, dict[str, Any]] = {
    "": {}, "--small": _SMALL, "--large": _LARGE,
}  # fmt: skip


def is_made(folder: Path) -> bool:
    """Whether a complete model is there; the configuration is written last."""
    return (folder / "config.json").exists()


def make(folder: Path, size: str = "") -> None:
    """
    Write the model; takes some seconds, and imports MLX.

    Args:
        size: `--small`, `--large`, or neither.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(_BUILTIN / name, folder / name)
    config = _config() | _SHAPES[size]
    mx.random.seed(0)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    rows = mx.array(_are_said(folder, config["vocab_size"]))
    model.lm_head.weight = mx.where(rows[:, None], model.lm_head.weight, 0)
    dtype, weights = getattr(mx, config["torch_dtype"]), {}
    for name, array in tree_flatten(model.parameters()):
        weights[name] = array.astype(dtype)
        mx.eval(weights[name])  # one by one: all of them would be there twice
    model = None
    mx.save_safetensors(
        str(folder / "model.safetensors"), weights, metadata={"format": "mlx"}
    )
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    (folder / "config.json").write_text(json.dumps(config))


def _config() -> dict[str, Any]:
    builtin = json.loads((_BUILTIN / "config.json").read_text())
    taken = ("vocab_size", "eos_token_id", "pad_token_id")
    return {**_SHAPE, **{name: builtin[name] for name in taken}}


def _are_said(folder: Path, vocab_size: int) -> list[bool]:
    """Whether each id is text that is shown at once, and no added token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first_added = min(tokenizer.get_added_tokens_decoder())
    texts = [tokenizer.decode([n]) for n in range(first_added)]
    said = [text not in ("", " ") and "\ufffd" not in text for text in texts]
    return said + [False] * (vocab_size - first_added)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    make(Path(sys.argv[1]), *sys.argv[2:3])
