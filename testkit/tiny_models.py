"""
Random tiny models with the built-in tokenizer and template, made with mlx-lm; or with
those that the models of some family have.

Real architectures of the kinds that caches differ in: `dense` (qwen3), `hybrid`
(qwen3_5: gated delta net + attention), `sliding` (gemma3: rotating window); `capped`
(gemma2), whose attention mlx-lm cannot batch. fp32, so
that warm and cold runs can be compared exactly. Special tokens are never sampled:
a greedy answer has exactly `max_tokens` tokens.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer

BUILTIN = Path(__file__).parents[1] / "sidecar" / "builtin_model"
WINDOW = 64


def make_model(
    out: Path,
    kind: str,
    *,
    layers: int = 2,
    hidden: int = 64,
    keep_special: bool = False,
    write_tokenizer: Callable[[Path], Sequence[str]] | None = None,
) -> Path:
    """
    Write a model folder; an existing one is kept.

    Args:
        write_tokenizer: puts a tokenizer and chat template there, and says which
            tokens end a turn; None: the built-in model's.
    """
    if (out / "model.safetensors").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    base = json.loads((BUILTIN / "config.json").read_text())
    vocab_size, stop_ids = _tokenizer(out, base, write_tokenizer)
    config = {**_CONFIGS[kind](vocab_size, layers, hidden)}
    config["eos_token_id"], config["pad_token_id"] = stop_ids, base["pad_token_id"]
    mx.random.seed(7)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if not keep_special:
        mute(model, base["eos_token_id"] - 10)
    weights = {
        name: a.astype(mx.float32) for name, a in tree_flatten(model.parameters())
    }
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return out


def _tokenizer(
    out: Path, base: dict[str, Any], write: Callable[[Path], Sequence[str]] | None
) -> tuple[int, int | list[int]]:
    """The size of its vocabulary, and what ends a turn."""
    if write is None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(BUILTIN / name, out / name)
        return base["vocab_size"], base["eos_token_id"]
    tokens = write(out)
    vocab = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()
    stops = [vocab[token] for token in tokens]
    return max(base["vocab_size"], max(vocab.values()) + 1), stops


def mute(model: Any, first_special: int) -> None:
    """Zero the output rows of the added tokens: a greedy choice passes them over."""
    for name, module in model.named_modules():
        if name.endswith("lm_head"):
            keep = mx.arange(module.weight.shape[0]) < first_special
            module.weight = mx.where(keep[:, None], module.weight, 0)


def _dense(vocab: int, layers: int, hidden: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": hidden * 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    }


RECURRENT: dict[str, Any] = {  # every other layer, as qwen3_5 has them
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def _hybrid(vocab: int, layers: int, hidden: int) -> dict[str, Any]:
    text = _dense(vocab, layers, hidden)
    text.pop("rope_theta")
    text |= RECURRENT
    return {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "text_config": text,
    }


def _sliding(vocab: int, layers: int, hidden: int) -> dict[str, Any]:
    config = _dense(vocab, layers, hidden)
    config.pop("tie_word_embeddings")
    return {
        **config,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
    }


def _capped(vocab: int, layers: int, hidden: int) -> dict[str, Any]:
    return {
        **_dense(vocab, layers, hidden),
        "model_type": "gemma2",
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


def _experts(vocab: int, layers: int, hidden: int) -> dict[str, Any]:
    return {
        **_dense(vocab, layers, hidden),
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
    }


_CONFIGS = {
    "dense": _dense,
    "hybrid": _hybrid,
    "sliding": _sliding,
    "capped": _capped,
    "experts": _experts,
}
