"""
Values of single architectures that `tools/tiny_seeing.py` cannot guess.

Some are of a text model's kind of layers, most of which tower or decoder a class
expects: it reads that from `model_type`.
"""

from collections.abc import Mapping
from typing import Any

Overrides = Mapping[str, Any]


def _kinds(vision: str, text: str | None = None, **more: Any) -> Overrides:
    """The `model_type` of the tower and of the text model."""
    parts: dict[str, Any] = {"vision_config": {"model_type": vision}}
    if text:
        parts["text_config"] = {"model_type": text}
    return parts | more


_MROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [6, 5, 5]}
_ROPE3 = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_QWEN_TEXT = {"rope_scaling": _MROPE, "layer_types": None}
_CONVOLVED = {
    "block_dim": 64, "block_multiple_of": 32, "block_ff_dim": 128,
    "layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3],
}  # fmt: skip
_RECURRENT = {
    "text_config": {
        "layer_types": None, "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default", "rope_type": "default", "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {"deepstack_visual_indexes": []},
}  # fmt: skip
_KIMI = {
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2,
        "head_dim": 32, "short_conv_kernel_size": 4,
    },
    "hidden_act": "situ",
}  # fmt: skip
_GEMMA4 = {
    "text_config": {
        "hidden_size_per_layer_input": 16, "global_head_dim": 32,
        "num_kv_shared_layers": 0, "use_bidirectional_attention": None,
    },
    "vision_config": {
        "hidden_size": 64, "head_dim": 32, "global_head_dim": 32,
        "pooling_kernel_size": 2,
    },
    "audio_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "output_proj_dims": 32,
    },
}  # fmt: skip
_DEEPSEEK = {
    "text_config": {
        "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "num_key_value_heads": 2,
        "model_type": "deepseek_v2", "topk_method": "greedy",
    },
}  # fmt: skip

SEEING_OVERRIDES: Mapping[str, Overrides] = {
    "aya_vision": _kinds("siglip_vision_model", "cohere2"),
    "cohere_compass": {
        "text_config": {
            "layer_types": None,
            "rope_parameters": {
                "full_attention": _ROPE3, "sliding_attention": _ROPE3,
            },
        },
    },
    "d1": {"text_config": _CONVOLVED},
    "deepseek_vl_v2": _kinds("vision", projector_config={"input_dim": 32}),
    "deepseekocr": _kinds("vision"),
    "dots_ocr": _kinds("dots_vit", "dots_ocr"),
    "ernie4_5_moe_vl": {
        "text_config": {
            "moe_num_experts": [4, 4], "moe_intermediate_size": [64, 64],
            "mrope_section": [6, 6, 4], "freq_allocation": 4,
        },
    },
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {"model_type": "gemma3_text", "mm_tokens_per_image": 16},
        "mm_tokens_per_image": 16,
    },
    "granite4_vision": {
        "vision_config": {"hidden_size": 64}, "deepstack_layer_map": [[-1, 0], [-2, 1]],
        "image_grid_pinpoints": [[64, 64], [64, 128], [128, 64]],
    },
    "hunyuan_vl": {
        "text_config": {
            "rope_scaling": {
                "type": "xdrope", "rope_type": "dynamic", "factor": 1.0,
                "alpha": 1000.0,
                "xdrope_section": [4, 4, 4, 4],
            },
        },
    },
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n_text", "intermediate_size": [128] * 4,
            "hidden_size_per_layer_input": 16, "laurel_rank": 8, "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "audio_config": {"hidden_size": 32, "conf_num_hidden_layers": 1},
    },
    "glm4v": _kinds("glm4v", "glm4v_text", eos_token_id=[0]),
    "glm4v_moe": _kinds("glm4v_moe", "glm4v_moe_text", eos_token_id=[0]),
    "idefics2": _kinds("idefics2", "mistral"),
    "idefics3": _kinds("idefics3", "llama"),
    "smolvlm": _kinds("smolvlm_vision", "llama"),
    "internvl_chat": _kinds("intern_vit_6b", "qwen2"),
    "glm5_next": {"text_config": {"num_key_value_heads": 2}},
    "indic_ocr": _RECURRENT,
    "internvl": _kinds("internvl_vision", "qwen2", image_seq_length=16),
    "kimi_k3": {
        "text_config": _KIMI,
        "vision_config": {
            "vt_hidden_size": 32, "mm_hidden_size": 32, "qkv_hidden_size": 32,
            "vt_num_hidden_layers": 2, "vt_num_attention_heads": 2,
            "vt_intermediate_size": 64,
        },
    },
    "lfm2_vl": {"text_config": _CONVOLVED},
    "llama4": {
        "text_config": {
            "num_experts_per_tok": 1, "attention_chunk_size": 64, "rope_scaling": None,
            "moe_layers": [0, 1, 2, 3],
        },
        "vision_config": {
            "model_type": "llama4_vision_model", "vision_output_dim": 32,
            "projector_input_dim": 32, "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5, "projector_dropout": 0.0,
            "intermediate_size": 128,
        },
    },
    "llava_onevision": {
        "image_grid_pinpoints": [[64, 64], [64, 128], [128, 64]],
        "vision_feature_select_strategy": "full",
    },
    "granite_vision": {"image_grid_pinpoints": [[64, 64], [64, 128], [128, 64]]},
    "llava": _kinds("clip_vision_model", "llama"),
    "llava_bunny": _kinds("siglip_vision_model", "qwen2"),
    "llava_next": _kinds("clip_vision_model", "mistral"),
    "minicpmv4_6": _RECURRENT,
    "minicpmv4_7": _RECURRENT,
    "mistral3": _kinds("pixtral", "mistral"),
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1], "layer_types": None, "index_block_size": 16,
            "index_topk_blocks": 2, "index_n_heads": 2, "index_head_dim": 32,
        },
    },
    "molmo_point": {"adapter_config": {}},
    "moondream3": {"text_config": {"num_key_value_heads": 2}},
    "mimo_v2": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1], "hybrid_layer_pattern": [0, 1, 0, 1],
            "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1,
            "swa_head_dim": 32, "swa_v_head_dim": 32, "partial_rotary_factor": 0.5,
        },
    },
    "multi_modality": {
        "projector_config": {
            "cls": "MlpProjector", "params": {"projector_type": "mlp_gelu", "depth": 2},
        },
        "vision_config": {"model_type": "vision", "params": {}},
        "text_config": {"model_type": "llama"},
    },
    "mage_vl": {"vision_config": {"hidden_size": 64, "num_attention_heads": 2}},
    "muse_glimmer": {"out_hidden_size": 128},
    "paddleocr_vl": {
        "text_config": {"head_dim": 32}, "vision_config": {"temporal_patch_size": 1},
    },
    "qwen4_exp": _RECURRENT,
    "phi3_v": {
        "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "qwen2_vl": {
        "vision_config": {"embed_dim": 32, "hidden_size": 64}, "rope_scaling": _MROPE,
    },
    "qwen2_5_vl": {"rope_scaling": _MROPE},
    "qwen3_5": _RECURRENT,
    "qwen3_5_moe": _RECURRENT,
    "step3p7": {"text_config": {"num_attention_groups": 1, "moe_layers_enum": "1,2,3"}},
    "unlimited_ocr": _kinds("vision"),
    "zaya1_vl": {
        "text_config": {"moe_router_topk": 1, "num_query_groups": 1},
        "vision_config": {"out_hidden_size": 64},
    },
    "qwen3_vl": {"text_config": _QWEN_TEXT},
    "qwen3_vl_moe": {"text_config": _QWEN_TEXT},
}  # fmt: skip

# Of the image processor and of the processor around it.
_EDGES = {"size": {"shortest_edge": 256, "longest_edge": 65536}}
_LONGEST = {
    "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64},
    "do_image_splitting": False, "do_pad": True,
}  # fmt: skip
_PINPOINTS = {
    "image_processor_type": "LlavaNextImageProcessor",
    "image_grid_pinpoints": [[64, 64], [64, 128], [128, 64]],
}  # fmt: skip
PROCESSORS: Mapping[str, dict[str, Any]] = {
    "aya_vision": {
        "image_processor": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": False,
        },
        "processor": {"image_token": "<image>", "img_size": 64, "patch_size": 16},
    },
    "dots_ocr": {
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **_EDGES},
    },
    "gemma3": {
        "image_processor": {"image_processor_type": "Gemma3ImageProcessor"},
        "processor": {"image_seq_length": 16},
    },
    "glm4v": {
        "image_processor": {"image_processor_type": "Glm4vImageProcessor", **_EDGES},
    },
    "glm4v_moe": {
        "image_processor": {"image_processor_type": "Glm4vImageProcessor", **_EDGES},
    },
    "granite4_vision": {"image_processor": _PINPOINTS},
    "granite_vision": {"image_processor": _PINPOINTS},
    "idefics2": {
        "image_processor": {
            "image_processor_type": "Idefics2ImageProcessor",
            **_LONGEST,
            "size": {"shortest_edge": 32, "longest_edge": 64},
        },
        "processor": {"image_seq_len": 16},
    },
    "idefics3": {
        "image_processor": {
            "image_processor_type": "Idefics3ImageProcessor",
            **_LONGEST,
        },
        "processor": {"image_seq_len": 16},
    },
    "internvl": {"processor": {"num_image_token": 16, "image_seq_length": 16}},
    "internvl_chat": {"processor": {"num_image_token": 16}},
    "llava_next": {"image_processor": _PINPOINTS},
    "llava_onevision": {
        "image_processor": {
            **_PINPOINTS,
            "image_processor_type": "LlavaOnevisionImageProcessor",
        },
    },
    "mllama": {
        "image_processor": {
            "image_processor_type": "MllamaImageProcessor",
            "max_image_tiles": 4,
        },
    },
    "paddleocr_vl": {"image_processor": {"temporal_patch_size": 1}},
    "paligemma": {
        "image_processor": {
            "image_processor_type": "SiglipImageProcessor",
            "image_seq_length": 64,
        },
        "processor": {"image_seq_length": 64},
    },
    "smolvlm": {
        "image_processor": {
            "image_processor_type": "SmolVLMImageProcessor",
            **_LONGEST,
        },
        "processor": {"image_seq_len": 16},
    },
}
