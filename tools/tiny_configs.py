"""
Tiny configurations of any architecture, made from the fields of its config classes.

A field's value goes by its name; a field that has a default and no tiny value keeps
the default. What does not fit an architecture is in `tools/tiny_overrides.py`.
"""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tools.tiny_overrides import TEXT_CLASSES, TEXT_OVERRIDES

Config = dict[str, Any]

LAYERS = 4  # so that each pattern of layers has one of each kind, and one again
HIDDEN = 64
HEADS = 2
HEAD_DIM = 32
WINDOW = 64
_LAYER_KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)

# Field name -> value, of text models of any architecture.
_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "model_dim", "d_model", "n_embd"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "hidden_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "n_inner"), 64),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_layer_freq", "decoder_sparse_step"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("index_head_dim",), HEAD_DIM),
    **dict.fromkeys(("index_n_heads", "index_topk"), 2),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "loop_window_size"), WINDOW),
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval"), 2),
    **dict.fromkeys(("layer_group_size", "no_rope_layer_interval"), 2),
    **dict.fromkeys(("linear_num_value_heads",), 2),
    **dict.fromkeys(("linear_num_key_heads",), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "conv1d_width"), 4),
    **dict.fromkeys(("mamba_d_conv", "conv_L_cache"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_expand",), 2),
    **dict.fromkeys(("query_pre_attn_scalar",), HEAD_DIM),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 4096),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), 10000.0),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), 1e-6),
    **dict.fromkeys(("layer_norm_epsilon", "layernorm_epsilon"), 1e-6),
    **dict.fromkeys(("routed_scaling_factor", "rotary_pct"), 1.0),
    "norm_topk_prob": True,
    "tie_word_embeddings": False,  # else no row of the output can be muted alone
    "layer_types": _LAYER_KINDS,
    "mlp_only_layers": [],
}
_VOCABULARY = ("vocab_size", "num_vocab", "vocab_size_per_layer_input")
_BY_TYPE: Mapping[str, Any] = {"bool": False, "int": 2, "float": 1.0, "str": "silu"}


def text_config(name: str, vocab_size: int) -> Config:
    """The config.json of a tiny model of one of mlx-lm's architectures."""
    library = importlib.import_module(f"mlx_lm.models.{name}")
    overrides = TEXT_OVERRIDES.get(name, {})
    config = filled(library.ModelArgs, vocab_size)
    config["model_type"] = name
    if "text_config" in names(library.ModelArgs):
        inner = _inner_class(name, library)
        config["text_config"] = filled(inner, vocab_size) | {"model_type": name}
        config["text_config"] |= overrides.get("text_config", {})
    return config | {k: v for k, v in overrides.items() if k != "text_config"}


def filled(
    made_from: Any, vocab_size: int, tiny: Mapping[str, Any] = MappingProxyType(_TINY)
) -> Config:
    """Tiny values for the fields of a config class, by default those of text."""
    config: Config = {}
    for field in dataclasses.fields(made_from):
        if field.name in _VOCABULARY:
            config[field.name] = vocab_size
        elif field.name in tiny:
            config[field.name] = tiny[field.name]
        elif _is_required(field):
            config[field.name] = _by_type(field)
    return config


def names(made_from: Any) -> set[str]:
    """The names of a config class's fields."""
    return {field.name for field in dataclasses.fields(made_from)}


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _by_type(field: "dataclasses.Field[Any]") -> Any:
    text = getattr(field.type, "__name__", str(field.type)).lower()
    if "optional" in text or "none" in text:
        return None
    if "list" in text or "tuple" in text:
        return []
    if "dict" in text:
        return {}
    return _BY_TYPE.get(text, 2)


def _inner_class(name: str, library: types.ModuleType) -> Any:
    """What the library reads `text_config` with: its own class, or another module's."""
    if name in TEXT_CLASSES:
        module, member = TEXT_CLASSES[name]
        return getattr(importlib.import_module(f"mlx_lm.models.{module}"), member)
    for member in ("TextConfig", "TextArgs", "TextModelArgs"):
        if dataclasses.is_dataclass(found := getattr(library, member, None)):
            return found
    modules = [m for _, m in inspect.getmembers(library, inspect.ismodule)]
    return next(m.ModelArgs for m in modules if hasattr(m, "ModelArgs"))
