"""
Values of single architectures that `tools/tiny_configs.py` cannot guess.

For an architecture with a `text_config`, the key "text_config" adds to that part.
"""

from collections.abc import Mapping
from typing import Any

# Where the class of `text_config` is, if not in the architecture's own module.
TEXT_CLASSES: Mapping[str, tuple[str, str]] = {
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_BY_KIND = {"sliding_attention": _ROPE, "full_attention": _ROPE}
_YARN = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0,
    "original_max_position_embeddings": 2048, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32, "beta_slow": 1, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_RECURRENT = ["linear_attention", "full_attention"] * 2
_CONVOLVED = ["conv", "full_attention"] * 2
_KIMI = {
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2,
        "head_dim": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
_EAGER_LFM = {
    "block_dim": 64, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
    "layer_types": _CONVOLVED,
}  # fmt: skip
_SCALED_MLA = {
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA",
    "zero_expert_num": 2, "zero_expert_type": "identity",
}  # fmt: skip

TEXT_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "deepseek_v41": {
        "compress_ratios": [0, 4, 0, 4], "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3], "o_groups": 2,
    },
    "exaone4": {
        "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n": {
        "text_config": {
            "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 16, "altup_num_inputs": 2,
            "altup_coef_clip": 120.0, "altup_active_idx": 0, "laurel_rank": 8,
            "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0,
        },
    },
    "glm_moe_dsa": {"rope_parameters": _ROPE, "topk_method": "noaux_tc"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "kimi_k3": {"text_config": {**_KIMI, "hidden_act": "situ"}},
    "kimi_linear": _KIMI,
    "lfm2": _EAGER_LFM,
    "lfm2-vl": {"text_config": _EAGER_LFM},
    "lfm2_moe": {"layer_types": _CONVOLVED},
    "llama4": {
        "text_config": {
            "rope_scaling": None, "attention_chunk_size": 64, "num_experts_per_tok": 1,
        },
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _SCALED_MLA,
    "longcat_flash_ngram": _SCALED_MLA,
    "mamba2": {"time_step_limit": [0.001, 100.0], "num_heads": 4},
    "mellum": {"rope_parameters": _BY_KIND},
    "mimo_v2_flash": {
        "moe_layer_freq": [0, 1, 1, 1], "hybrid_layer_pattern": [0, 1, 0, 1],
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 32,
        "swa_v_head_dim": 32, "swa_rope_theta": 10000.0, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "partial_rotary_factor": 0.5,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope", "rope_type": "longrope", "long_factor": [1.5] * 8,
            "short_factor": [1.0] * 8, "original_max_position_embeddings": 2048,
        },
    },
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1], "sparse_attention_freq": [0, 1, 1, 1],
            "layer_types": None, "index_block_size": 16, "index_topk_blocks": 2,
        },
    },
    "ministral3": {"rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {
        "text_config": {
            "num_shared_experts": 0, "rope_parameters": _ROPE, "moe_hidden_size": 64,
            "layer_rope_theta": [10000.0, 0, 10000.0, 0],
        },
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 2.0}},
        ],
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "moe", "mlp"],
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
    },
    "openelm": {
        "num_transformer_layers": 2, "num_query_heads": [2, 4], "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 2.0], "ffn_dim_divisor": 32,
    },
    "olmo_hybrid": {"layer_types": _RECURRENT},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 32},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"rope_parameters": _BY_KIND},
}  # fmt: skip
